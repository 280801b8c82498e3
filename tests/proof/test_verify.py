"""The streamed proof against what one sees by patching the whole model and watching it."""

import math
from collections import Counter
from dataclasses import replace
from itertools import chain, pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.model.logits import count_rows_at_once
from calibrate.prompts.prompt import Prompt
from calibrate.proof import layers, verify
from calibrate.proof.layers import PLACES, LayerHistory, measure_places
from calibrate.proof.verify import LengthProof, Prover
from calibrate.work.executor import open_local_executor
from s2o_runtime import patch
from s2o_runtime.attention.dense import fastest_dense_attention
from s2o_runtime.config import LayerConfig, TileConfig
from support.executors import CPU
from support.models import make_profile, stream, watch
from support.streamed import Layers, prove, random_prompts, uniform

LENGTHS = (260, 330)
EXACT, SPARSE = uniform(0.0), uniform(100.0)


def prove_all(loaded, config, prompts=None):
    return prove(loaded, prompts or random_prompts(*LENGTHS), Layers((config, config)))[1]


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "streamed"])
def test_the_proof_is_what_the_patched_model_shows(tiny_folder, resident):
    prompts = random_prompts(*LENGTHS)
    proofs = prove_all(stream(tiny_folder, resident), SPARSE, prompts)
    model = stream(tiny_folder, True).model
    for length in LENGTHS:
        shown = [shown_by_patching(model, SPARSE, prompt.ids) for prompt in prompts[length]]
        proof = proofs[length]
        assert proof.kl == pytest.approx(sum(kl for kl, _, _ in shown) / 2, rel=1e-3)
        assert proof.top1 == pytest.approx(sum(top1 for _, top1, _ in shown) / 2)
        assert proof.kl > 1e-4 < proof.top1 < 1
        for index, layer in enumerate(proof.layers):
            mse, power, density = (sum(layers[index][part] for _, _, layers in shown) / 2 for part in range(3))
            assert layer.mse == pytest.approx(mse, rel=1e-3)
            assert layer.dense_power == pytest.approx(power, rel=1e-4)
            assert layer.density == pytest.approx(density)
            assert 0.2 < density < 0.95
            rows = torch.cat([layers[index][3] for _, _, layers in shown])
            assert layer.worst == pytest.approx(float(rows.quantile(0.99, interpolation="nearest")), rel=1e-3)


def test_predictions_are_compared_alike_in_pieces_of_any_size(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    dense, patched = (torch.randn(1, 90, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    prompt = Prompt(torch.randint(40, (90,), generator=generator), answers=((20, 23), (50, 52)))
    head = torch.randn(16, 40, generator=generator, dtype=torch.float64)

    def compared(rows):
        monkeypatch.setattr(layers, "count_rows_at_once", lambda vocabulary: rows if vocabulary == 40 else None)
        positions = layers.list_compared_rows(prompt)
        assert positions.tolist() == [*range(90), 19, 20, 21, 49, 50]
        models = dense[:, positions], (dense + patched / 9)[:, positions]
        return layers.compare(prompt, positions, *models, lambda hidden: hidden @ head)

    assert [count_rows_at_once(vocabulary) for vocabulary in (151936, 65536, 4096)] == [512, 512, 8192]
    whole, pieces = compared(90), compared(7)
    assert pieces == replace(whole, kl=pieces.kl)
    assert pieces.kl == pytest.approx(whole.kl, rel=1e-12)
    ours, theirs = ((hidden[0] @ head).float().log_softmax(-1) for hidden in (dense, dense + patched / 9))
    assert whole.kl == pytest.approx(float(F.kl_div(theirs, ours, log_target=True, reduction="batchmean")), rel=1e-5)
    assert whole.top1 == pytest.approx(float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()))


def test_a_layer_that_is_dense_is_compared_with_itself(tiny_folder, monkeypatch):
    expected = prove_all(stream(tiny_folder, True), SPARSE.as_dense())
    monkeypatch.setattr(layers, "fastest_dense_attention", None)
    for length, proof in prove_all(stream(tiny_folder, True), SPARSE.as_dense()).items():
        assert [(layer.mse, layer.worst, layer.density) for layer in proof.layers] == [(0.0, 0.0, 1.0)] * 2
        assert [layer.dense_power for layer in proof.layers] == [one.dense_power for one in expected[length].layers]
        assert proof.kl == pytest.approx(0.0, abs=1e-7)


@torch.no_grad()
def shown_by_patching(model, config, ids):
    """(KL, top-1, [(mse, power, density, worst rows of tiles) of each layer]) of one prompt."""
    dense = model(ids[None], use_cache=False).logits[0]
    profile = make_profile(model, 0.0, min_length=10)
    profile = replace(profile, layers=((config,) * 2,) * len(profile.lengths))
    patched, layers = watch(model, profile, ids)
    errors = []
    for truth, out, density in layers:
        off, power = (out - truth).square(), truth.square().sum(-1)
        rows = (off.sum(-1) / torch.maximum(power, power.mean(-1, keepdim=True))).sqrt()
        worst = [rows[0, h, first : first + 64].max() for h in range(4) for first in range(0, len(ids), 64)]
        errors.append((float(off.mean()), float(truth.square().mean()), density, torch.stack(worst)))
    kl = F.kl_div(patched.log_softmax(-1), dense.log_softmax(-1), reduction="batchmean", log_target=True)
    top1 = (dense.argmax(-1) == patched.argmax(-1)).double().mean()
    return float(kl), float(top1), errors


@pytest.mark.parametrize("plenty", [True, False], ids=["memory is plenty", "memory is scarce"])
def test_what_was_revised_is_what_is_proven(tiny_folder, plenty, monkeypatch):
    """If memory is plenty, a layer that is revised is compared with the same dense attention again."""
    asked, computed = [], []
    monkeypatch.setattr(layers, "has_plenty_of_memory", lambda device: plenty)

    def dense_attention(*inputs):
        computed.append(inputs[0].shape[2])
        return fastest_dense_attention(*inputs)

    monkeypatch.setattr(layers, "fastest_dense_attention", dense_attention)

    def revise(layers, length, layer, proof):
        asked.append((length, layer, layers.configs, proof))
        return Layers((EXACT, SPARSE)) if layer == 0 and layers.configs[0] == SPARSE else None

    steps = []
    loaded = stream(tiny_folder, False)
    begun, revised = Layers((SPARSE, SPARSE)), Layers((EXACT, SPARSE))
    proven, proofs = prove(loaded, random_prompts(*LENGTHS), begun, revise, on_step=lambda: steps.append(1))
    assert (proven, len(steps)) == (revised, 4)
    assert [asked_of[:2] for asked_of in asked] == [(260, 0), (260, 0), (330, 0), (260, 1), (330, 1)]
    assert [configs for _, _, configs, _ in asked] == [begun.configs] + 4 * [revised.configs]
    of_layers = {260: 2 if plenty else 3, 330: 2}  # only the revised one is tried twice
    assert Counter(computed) == {length: 2 * tries for length, tries in of_layers.items()}  # of two prompts
    assert asked[0][3].mse > 1e-6
    same, expected = prove(loaded, random_prompts(*LENGTHS), revised)
    assert same is revised
    for length, proof in proofs.items():
        assert (proof.layers, proof.agreements) == (expected[length].layers, expected[length].agreements)
        assert proof.layers[1].density < 0.95 < proof.layers[0].density == 1.0


@torch.no_grad()
def test_needles_are_kept_that_the_patched_model_finds_or_nearly_does(tiny_folder, monkeypatch):
    """Spans of what the dense model would say next, and one of what it would not."""
    loaded = stream(tiny_folder, True)
    ids = random_prompts(*LENGTHS)[330][0].ids.clone()
    spans = ((20, 22), (120, 123), (150, 154), (180, 184))
    for begin, end in spans[:3]:
        for place in range(begin, end):
            ids[place] = loaded.model(ids[None, :place], use_cache=False).logits[0, -1].argmax()
    ids[181] = (loaded.model(ids[None, :181], use_cache=False).logits[0, -1].argmax() + 1) % 128
    prompts = {330: [Prompt(ids, spans), random_prompts(*LENGTHS)[330][1]]}
    assert prove_all(loaded, EXACT, prompts)[330].needles == (3, 3)

    model = stream(tiny_folder, True).model
    patch(model, replace(make_profile(model, 0.0, min_length=10), layers=((SPARSE,) * 2,) * 2), strict=True)
    patched, dense = (one(ids[None], use_cache=False).logits[0].log_softmax(-1) for one in (model, loaded.model))
    exact, fell = [], []
    for begin, end in spans[:3]:
        exact.append(torch.equal(patched.argmax(-1)[begin - 1 : end - 1], ids[begin:end]))
        fell.append(float((dense - patched)[range(begin - 1, end - 1), ids[begin:end]].sum()))
    assert not all(exact)
    for nats in (1, 0.01):  # the model is undecided nearly everywhere
        monkeypatch.setattr(layers, "KEPT_WITHIN", nats)
        kept = sum(finds or lost < nats for finds, lost in zip(exact, fell, strict=True))
        assert prove_all(loaded, SPARSE, prompts)[330].needles == (kept, 3)


@pytest.mark.parametrize("windows", [16, 8])
def test_errors_of_parts_are_those_of_their_rows(tiny_folder, monkeypatch, windows):
    """The eighths and the places in segments: of the first layer, whose inputs any model has."""
    seen, real = [], layers.select_rows

    def watch(out, windows):
        seen.append(out)
        return real(out, windows)

    prompts = {330: random_prompts(330)[330][:1]}
    monkeypatch.setattr(layers, "select_rows", watch)
    prove_all(stream(tiny_folder, False), SPARSE.as_dense(), prompts)
    monkeypatch.setattr(layers, "WINDOWS", windows)
    monkeypatch.setattr(layers, "WINDOW_ROWS", 24)
    layer = prove_all(stream(tiny_folder, False), SPARSE, prompts)[330].layers[0]
    (truth, _, out, _), drawn = seen, layers.draw_windows(prompts[330][0])
    rows, firsts = torch.tensor([*chain(*drawn)]), layers.draw_first_rows(drawn, 330, SPARSE.segment)
    assert len(rows) == (330 if windows == 16 else 8 * 24)
    everything = torch.cat([rows, torch.tensor([*chain(*firsts)], dtype=torch.int64)])
    every_begin = [*range(0, 330, SPARSE.segment)]  # of segments
    assert set(every_begin) - {0} <= set(everything.tolist())
    assert len(everything) == len(everything.unique())
    assert (everything[len(rows) :] % SPARSE.segment == 0).all()
    in_segment = everything % SPARSE.segment
    places = [everything[(in_segment >= first) & (in_segment < end)] for first, end in pairwise((*PLACES, 1 << 20))]
    parts = zip((*layer.of_prompts, *layer.eighths, *layer.places), (rows, *rows.tensor_split(8), *places), strict=True)
    for (mse, power), part in parts:
        if len(part):
            assert mse == pytest.approx(float((out - truth)[:, :, part].square().mean()), rel=1e-3, abs=1e-12)
            assert power == pytest.approx(float(truth[:, :, part].square().mean()), rel=1e-3)
    assert layer.eighths[7][0] > 1e-6


def test_windows_are_of_every_part_and_take_no_row_more_often_than_another(monkeypatch):
    monkeypatch.setattr(layers, "WINDOWS", 4)
    monkeypatch.setattr(layers, "WINDOW_ROWS", 128)
    taken = torch.zeros(1024)
    for number in range(2000):
        windows = layers.draw_windows(Prompt(torch.tensor([number] * 1024)))
        rows = torch.tensor([*chain(*windows)])
        assert rows.equal(rows.sort().values)
        assert torch.bincount(rows // 256).tolist() == [128] * 4
        taken[rows] += 1
    assert (taken / 2000 - 0.5).abs().max() < 5 * 0.5 / 2000**0.5
    assert layers.draw_windows(Prompt(torch.arange(512))) == [range(512)]


def test_the_dense_model_reads_a_prompt_once(tiny_folder, monkeypatch):
    """Another proof of the same prompts says the same of predictions without it; of long prompts some rows are read."""
    monkeypatch.setattr(layers, "COMPARED_ROWS", 30)
    prompts, loaded, streams = random_prompts(330), stream(tiny_folder, True), []
    real = layers.LayerwiseForward
    monkeypatch.setattr(
        layers, "LayerwiseForward", lambda loaded, given: streams.append(len(given)) or real(loaded, given)
    )
    with open_local_executor(loaded) as executor:
        prover = Prover(executor)
        source = Layers((SPARSE, SPARSE))
        first, again = (prover.prove(source, prompts, timed=False)[1][330] for _ in range(2))
    with open_local_executor(loaded) as executor:
        alone = Prover(executor).prove(source, prompts, timed=False, compared=False)[1][330]
    assert streams == [2, 2, 1, 1, 1, 1]
    assert again == first
    assert (alone.layers, alone.needles, math.isnan(alone.kl)) == (first.layers, None, True)
    assert layers.list_compared_rows(prompts[330][0])[:3].tolist() == [0, 11, 22]


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 700), st.sampled_from([64, 200, 1000]), st.lists(st.integers(1, 5), min_size=11), st.integers(0, 2)
)
def test_places_weigh_back_to_the_rows_that_are_not_dense_as_last(length, chunk, segments, last_tiles):
    squares, begin = torch.rand(2, length, dtype=torch.float64, generator=torch.Generator().manual_seed(length)), 0
    calls, counts, expected = [], [0] * len(PLACES), torch.zeros(2, len(PLACES), dtype=torch.float64)
    measured = range(0, length, 1 + last_tiles)  # all rows, or some
    for segment, end in zip(segments, (*range(chunk, length, chunk), length), strict=False):
        config = LayerConfig.uniform(
            1, tile=TileConfig(block_m=64), segment=64 * segment, last_rows=128 * last_tiles * (end == length)
        )
        calls.append((end, config))
        for row in range(config.find_first_dense_row(end - begin)):
            if begin + row in measured:
                place = sum(row % config.segment >= first for first in PLACES) - 1
                counts[place] += 1
                expected[:, place] += squares[:, begin + row]
        begin = end
    places = measure_places(squares[:, measured], torch.tensor(measured), calls)
    sums = torch.tensor(places, dtype=torch.float64).T * torch.tensor(counts)
    torch.testing.assert_close(sums, expected)


def test_layers_are_timed_in_as_many_parts_as_there_are_workers(monkeypatch):
    """Each part is the affinity of its items, so that parts are timed beside one another."""
    timed = []
    monkeypatch.setattr(
        verify,
        "measure_items",
        lambda items, executor, journal: timed.extend(items) or [{"patched": 1.0, "dense": 2.0}] * len(items),
    )
    executor = SimpleNamespace(size=2, device=CPU, geometry=SimpleNamespace(decoder_layers=5, layers=0))
    proof = LengthProof((), 0.0, 1.0, None, prompts=(SimpleNamespace(sha256="a"),))
    times = Prover(executor)._add_times({512: proof}, {512: LayerHistory()})[512]
    assert (times.prefill_seconds, times.dense_prefill_seconds) == (5.0, 10.0)
    assert [item.affinity for item in timed] == [(512, 0), (512, 0), (512, 0), (512, 1), (512, 1)]


def test_what_layers_of_one_form_share_is_timed_in_the_first(tiny_folder, monkeypatch):
    """Both attentions in each, and again where S2O's is the slower."""
    asked = []
    seconds = {"s2o_attention": [1.5, 5.0, 3.0], "fastest_dense_attention": [4.0, 3.5, 4.5, 9.0], "dense": [10.0]}

    def medians(calls, device, rounds, flushes):
        asked.append([call.func.__name__ for call in calls.values()])
        return {name: seconds[call.func.__name__].pop(0) for name, call in calls.items()}

    monkeypatch.setattr(verify, "measure_medians", medians)
    proof = prove_all(stream(tiny_folder, False), SPARSE, random_prompts(260))[260]
    assert asked == [["fastest_dense_attention"], ["dense"], *[["s2o_attention", "fastest_dense_attention"]] * 3]
    assert (proof.prefill_seconds, proof.dense_prefill_seconds) == (2 * 6.0 + 1.5 + 3.0, 2 * 6.0 + 3.5 + 4.5)
