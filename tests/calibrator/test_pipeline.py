"""A whole calibration of a small model on a CPU: what is written was proven, and what was proven is what is written."""

import json
import shutil
import statistics
from collections import Counter
from dataclasses import replace
from types import MappingProxyType

import pytest

from calibrate.journal import Journal
from calibrate.model.models import load
from calibrate.pipeline import calibrate, make_journal_identity
from calibrate.prompts.prompts import load_prompts
from calibrate.proof import adjust
from calibrate.proof.answers import measure_answers
from calibrate.proof.recheck import open_profile, verify_certificate, verify_proof
from calibrate.proof.verify import LengthProof, Prover
from calibrate.recipe import DEFAULT_BUDGET, MAX_REL_MSE, Budget, Recipe
from calibrate.record import read_record
from calibrate.report import contents
from calibrate.report.sections import list_claims
from calibrate.search.allocate import Allocation, Point, SearchConstraints
from calibrate.search.choice import CalibrationDense, LayerBudget, LayerPlan, SearchPoint
from calibrate.timing import Timing
from calibrate.work.executor import WorkerState, open_local_executor
from s2o_runtime import load_profile
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.errors import InputError
from s2o_runtime.identity import Geometry
from support.executors import CPU
from support.models import watch
from support.tiny import QUICK, recipe


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    """One for all tests, so that each budget finds the same measurements."""
    return tmp_path_factory.mktemp("journal") / "journal.sqlite"


@pytest.fixture
def run(tiny_folder, journal, tmp_path):
    def run(name="p.safetensors", **changes):
        made = recipe(tiny_folder, tmp_path / name, **{"trials": 2, "journal": journal} | changes)
        return made, calibrate(made, progress=False)

    return run


def split_taus(config):
    """A layer's thresholds, which a file has in float32, and all else of it."""
    taus = [head.tau for head in config.heads]
    return pytest.approx(taus, rel=1e-6), replace(config, heads=tuple(replace(head, tau=1.0) for head in config.heads))


def assert_what_was_proven_is_written(recipe, result):
    """At every length that was proven, in the file as a server would load it."""
    assert result.written
    profile = load_profile(recipe.out)
    assert profile.record == result.profile.record
    lengths = {*recipe.lengths, *recipe.checked_lengths}
    assert set(result.proofs) == lengths
    assert set(result.configs) == set(result.limits) == {(length, layer) for length in lengths for layer in range(2)}
    for (length, layer), config in result.configs.items():
        taus, others = split_taus(config)
        written = profile.layer_config(layer, length)
        assert ([head.tau for head in written.heads], split_taus(written)[1]) == (taus, others)
        proof = result.proofs[length].layers[layer]
        assert config.is_dense or proof.error(recipe.budget) <= result.limits[length, layer]
    return profile


def seen_from_outside(folder, recipe, profile):
    """(length, layer) -> (rel mse, density), of a freshly loaded model, patched and watched."""
    loaded, seen = load(str(folder), "cpu"), {}
    for length, (prompt,) in load_prompts(recipe, loaded.tokenizer).held_out.items():
        for index, (truth, out, density) in enumerate(watch(loaded.model, profile, prompt.ids)[1]):
            seen[length, index] = float((out - truth).square().mean() / truth.square().mean()), density
    return seen


@pytest.mark.slow(reason="calibrates a tiny model, seconds each")
@pytest.mark.parametrize("changes", [{}, {"tails": (False,), "worst_rows": 0.22}], ids=["defaults", "rows"])
def test_the_profile_does_what_it_says(changes, tiny_folder, run):
    """Measured from outside, at the calibrated lengths and at the one that was only checked."""
    recipe, result = run(**changes)
    assert result.met
    profile = assert_what_was_proven_is_written(recipe, result)
    outside = seen_from_outside(tiny_folder, recipe, profile)
    record = read_record(profile)
    recorded = {proof.length: proof for proof in record.held_out}
    assert {length: proof.calibrated for length, proof in recorded.items()} == {512: True, 1024: True, 768: False}
    assert len(outside) == 6
    for (length, layer), (error, density) in outside.items():
        proof = recorded[length].layers[layer]
        assert error == pytest.approx(proof.rel_mse, rel=1e-3)
        assert density == pytest.approx(proof.density)
        assert error <= proof.limit
        assert proof.tightened == result.tightened[length, layer]
    for length in recorded:
        assert sum(outside[length, layer][0] for layer in range(2)) / 2 <= recipe.budget.value
    assert min(density for _, density in outside.values()) < 0.8
    assert (record.proof, record.problems) == ("held out", ())
    assert record.objective == "predicted latency"
    assert record.certificate is None
    assert record.not_proven == ("that the next prompt keeps its limits: there is no certificate",)
    hashes = record.data
    assert not {prompt.sha256 for prompt in hashes.calibration} & {prompt.sha256 for prompt in hashes.held_out}
    assert [prompt.length for prompt in hashes.held_out] == [512, 1024, 768]
    if "tails" in changes:
        assert not any(head.tail == "mean" for config in result.configs.values() for head in config.heads)
        every = [choice.allocation.points for each in result.chosen.values() for choice in each.choices]
        assert all(point.worst <= 0.22 for points in every for point in points)


CERTIFIED = {"num_certify": 3, "lengths": (512,), "budget_rel_mse": 2e-2}


@pytest.fixture(scope="module")
def certified(tiny_folder, journal, tmp_path_factory):
    """The recipe of a calibration with a certificate, and its result."""
    out = tmp_path_factory.mktemp("certified") / "first"
    made = recipe(tiny_folder, out, **{"trials": 2, "journal": journal} | CERTIFIED)
    return made, calibrate(made, progress=False)


def test_what_is_written_is_certified_on_prompts_of_its_own(certified, run):
    """Every layer's bound is within its limit, or the layer is dense; the same inputs give the same bytes."""
    recipe, result = certified
    assert result.met
    profile = assert_what_was_proven_is_written(recipe, result)
    record = read_record(profile)
    (length,) = record.certificate.lengths
    assert (length.length, length.prompts, length.tokens) == (512, 3, 3 * 512)
    for layer, certified in enumerate(length.layers):
        config = result.configs[512, layer]
        assert certified.limit == result.limits[512, layer]
        assert config.is_dense or certified.bound <= certified.limit
        assert (certified.spent == 0) == (result.chosen[512].choices[layer].why_dense == CalibrationDense.OVER_BOUND)
        assert certified.density == pytest.approx(result.proofs[512].layers[layer].density, abs=0.1)
    assert sum(one.prompts for one in length.domains) == 3
    hashes = record.data
    parts = [{prompt.sha256 for prompt in part} for part in (hashes.calibration, hashes.held_out, hashes.certify)]
    assert [len(part) for part in parts] == [2, 1, 3]
    assert len(set.union(*parts)) == 6
    assert record.not_proven[-1].startswith("text unlike these prompts")
    assert contents.make_report(result).certificate == record.certificate
    again, _ = run("again", **CERTIFIED)
    assert again.out.read_bytes() == recipe.out.read_bytes()


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "streamed"])
def test_by_default_what_is_written_keeps_to_a_budget_of_answers(resident, tiny_folder, tmp_path, monkeypatch):
    """Measured again with the profile, and on fresh prompts, in chunks; a tiny model's answers hardly change."""
    options = {"lengths": (768,), "segments": (64,), "num_held_out": 2, "num_certify": 3, "chunk": 400}
    made = Recipe.from_options(
        QUICK | options | {"model": str(tiny_folder), "out": tmp_path / "p.safetensors", "device": "cpu", "trials": 1}
    )
    assert made.budget == DEFAULT_BUDGET == Budget("kl", 2e-3)
    loaded = load(str(tiny_folder), "cpu", resident=resident)
    result = calibrate(made, progress=False, loaded=loaded)
    assert result.met
    profile = assert_what_was_proven_is_written(made, result)
    assert not any(config.is_dense for config in result.configs.values())
    assert max(result.limits.values()) <= MAX_REL_MSE
    record = read_record(profile)
    assert (record.budget.kind, record.budget.unit, record.budget.value) == ("kl", "rel_mse", 2e-3)
    (shown,) = record.certificate.lengths
    assert 1e-6 < shown.answers.mean < shown.answers.bound <= 2e-3
    assert (shown.layers, shown.mean_kl, shown.answers.noise) == (None, None, None)
    assert shown.answers.quoted == (None if resident else True)
    assert resident != ("answers as the documents give them" in list_claims(record.certificate)[0])
    prompts = load_prompts(made, loaded.tokenizer).certify[768]
    with open_local_executor(loaded) as executor:
        (answers,) = measure_answers(Prover(executor, chunk=made.chunk), prompts, [profile])
    measured = statistics.fmean(prompt.kl for prompt in answers)
    assert 0.5 * shown.answers.mean < measured <= 1.001 * shown.answers.mean  # the proof may have taken from layers
    options = {"model": str(tiny_folder), "device": "cpu"}
    opened, fresh = (open_profile(made.out, options | seed) for seed in ({}, {"seed": 5}))
    check = verify_certificate(fresh)
    assert (verify_proof(opened).problems, check.problems, check.lengths[0].groups) == ((), (), 3)
    said = "are 3 fresh prompts of 768 tokens, of 3 groups of text, expected at least 64 of 3 groups: give another"
    with pytest.raises(InputError, match=said):
        verify_certificate(replace(fresh, num_certify=64))
    stages, run = set(), WorkerState.run
    monkeypatch.setattr(WorkerState, "run", lambda worker, item: stages.add(item.stage) or run(worker, item))
    again = calibrate(replace(made, budget=Budget("kl", 1e-3), out=tmp_path / "q"), progress=False, loaded=loaded)
    assert 0 < again.certificates[768].answers.bound <= 1e-3
    assert stages
    assert not {"curves", "sensitivity"} & stages  # another budget takes them from the journal


def test_no_budget_at_all_gives_a_dense_profile(run):
    _, result = run(budget_mse=1e-30, lengths=(512,))
    assert result.met
    assert all(config.is_dense for config in result.configs.values())
    assert not result.tightened
    assert {layer.density for proof in result.proofs.values() for layer in proof.layers} == {1.0}


@pytest.mark.parametrize(("change", "said"), [
    ({"weights": {"fingerprint": "f" * 64}}, r"model\.fingerprint"),
    ({"weights": {"geometry": Geometry("llama", 3, 4, 2, 32)}}, r"model\.layers 2, this run has 3"),
    ({"versions": {"transformers": "5.0.0"}}, r"versions\.transformers 5.*, this run has 5\.0\.0"),
    ({"device": DeviceIdentity("cuda", "H200")}, r"device\.kind cpu, this run has cuda"),
    ({"config": {"rms_norm_eps": 0.125}}, r"model\.config\.rms_norm_eps 1e-06, this run has 0\.125: give"),
    ({"config": {"use_cache": False}}, None),  # which decides nothing
], ids=["weights", "layers", "versions", "device", "config", "same"])  # fmt: skip
def test_what_changed_is_named(change, said, tiny_folder, tmp_path):
    """Else a run would continue with measurements of another function; the journal is left as it is."""
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_folder, folder)

    def opened(weights=MappingProxyType({}), versions=MappingProxyType({}), device=CPU):
        identity = make_journal_identity(replace(load(str(folder), "cpu"), **weights), device)
        identity["versions"] |= versions
        return Journal.open(tmp_path / "j", identity)

    with opened() as journal:
        journal.put("curve", {"layer": 0}, [1.0])
    before, path = (tmp_path / "j").read_bytes(), folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change.pop("config", {})))
    if said:
        with pytest.raises(InputError, match=said):
            opened(**change)
    else:
        with opened(**change) as journal:
            assert journal.get("curve", {"layer": 0}) == [1.0]
    assert (tmp_path / "j").read_bytes() == before


def choice(timing, mode="s2o"):
    config = LayerConfig.uniform(2, tau=1.0, segment=512, mode=mode, tile=TileConfig())
    allocation = Allocation(tuple(Point(0.0, 0.5, 0.5, 0.0, head) for head in config.heads))
    return LayerPlan(SearchPoint(512, config.tile), {}, LayerBudget(1.0, 0.0, SearchConstraints()), allocation, timing)


def test_times_are_shares_of_dense_attentions():
    """The second layer was timed while the GPU was half as fast."""
    timings = [Timing(seconds, dense) for seconds, dense in ((0.01, 0.04), (0.04, 0.08), (0.05, 0.04))]
    choices = [choice(timings[0]), choice(timings[1]), choice(timings[2], "dense"), choice(None)]
    assert [contents._predict_seconds(each, choices) for each in choices] == [0.01, 0.02, 0.04, None]


@pytest.mark.parametrize("needles", [(19, 20), (18, 20), (5, 6), (4, 6), (0, 0), None])
def test_how_many_needles_may_be_lost(needles, tmp_path):
    made = recipe("demo", tmp_path / "p")  # 95% are to be kept
    proofs = {512: LengthProof((), 0.0, 1.0, needles, 0.1, 0.1)}
    assert bool(adjust.find_lost_needles(proofs, made)) == (needles in [(18, 20), (4, 6)])
    all_of_them = replace(made, needles=1.0)
    assert bool(adjust.find_lost_needles(proofs, all_of_them)) == (needles not in [(0, 0), None])


def test_the_report_says_what_the_result_is(certified):
    recipe, result = certified
    document = json.loads(json.dumps(contents.make_report(result).to_json(), allow_nan=False))
    assert (document["out"], document["met"], document["problems"]) == (str(recipe.out), True, [])
    assert document["journal"] == {"path": str(recipe.journal), "reused": result.journal_reused}
    assert document["trials"] == 2 * len(result.chosen[512].groups)
    (entry,) = document["lengths"]
    for row, layer, choice in zip(entry["layers"], result.proofs[512].layers, result.chosen[512].choices, strict=True):
        place = 512, row["layer"]
        heads = Counter(head.mode for head in result.configs[place].heads)
        assert row["error"] == layer.rel_mse == pytest.approx(row["error_over_limit"] * result.limits[place])
        assert row["tightened"] == result.tightened[place]
        assert (row["dense_heads"], sum(row["representatives"].values())) == (heads["dense"], heads["s2o"])
        power = next(iter(choice.curves.values())).dense_power
        assert row["predicted_error"] == pytest.approx(choice.allocation.mse / power)
        assert sum(head["error"] for head in row["heads"]) / 4 == pytest.approx(row["predicted_error"])
        assert [head["tau"] for head in row["heads"]] == [head.tau for head in choice.config.heads]
        assert choice.config.is_dense or [choice.allocation.density, row["predicted_error"]] in row["frontier"]
        assert [error for _, error in row["frontier"]] == sorted(error for _, error in row["frontier"])
    assert any(choice.config.is_dense is False for choice in result.chosen[512].choices)
