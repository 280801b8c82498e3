"""Many architectures: calibrated, and patched with a profile that never stops, each must equal its eager attention.

What holds for transformers models in general is in test_hf.py; here is what differs between them: norms of queries
and keys, experts, merged projections, sliding windows, soft-capped scores.
"""

import copy
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedConfig, QuantizedCache, StaticCache
from transformers.utils import is_hqq_available, is_optimum_quanto_available

import s2o_runtime
from calibrate import Recipe, pipeline
from calibrate.model.models import from_memory
from calibrate.model.weights import get_model_class
from calibrate.record import read_record
from s2o_runtime import explain, patch, patched, unpatch
from s2o_runtime.errors import ModelError
from s2o_runtime.identity import fingerprint, geometry
from s2o_runtime.logs import log_once
from s2o_runtime.profile import Profile, load_profile
from support.architectures import CASES, COMPILED, LINEAR, RUNS, SILENT, SLIDING, WINDOWED, Case
from support.marks import all_but_first
from support.models import close, make_profile, padded_batch, prompt, twin
from support.tiny import tiny_tokenizer

EXHAUSTIVE = pytest.mark.exhaustive(reason="further architectures, or compiles a model, seconds each")
QUICK = ("llama", "qwen2-sliding", "gemma2", "gpt-oss")  # S2O everywhere, with windows, capped scores, learned sinks

# transformers' own takes neither windows, however long, nor the positions of images
QUANTISED_CACHES = [
    name for name, case in CASES.items() if case.runs_all and not case.vision and name != "phi3-long-window"
]
LENGTH, SHORTEST = 150, 32


def models(name: str) -> tuple[Any, Any]:
    """The eager model, and one with the same weights to patch, without what vision models keep of an earlier batch."""
    for module in (part for model in _models(name) for part in model.modules() if hasattr(part, "rope_deltas")):
        module.rope_deltas = None
    return _models(name)


@cache
def _models(name: str) -> tuple[Any, Any]:
    torch.manual_seed(1)
    config = CASES[name].config
    eager = get_model_class(config).from_config(config, attn_implementation="eager").eval()
    return eager, twin(eager, "sdpa" if eager._supports_sdpa else "eager")


def profile_of(model: Any, tau: float = 0.0) -> Profile:
    return make_profile(model, tau, SHORTEST)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """At these sizes a second thread only waits, minutes in all where the cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[name if name in QUICK else pytest.param(name, marks=EXHAUSTIVE) for name in CASES])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def eager(name: str) -> Any:
    return models(name)[0]


@pytest.fixture
def model(name: str) -> Iterator[Any]:
    """The patched model; what it ran is checked after every test: S2O only where it may, reasons where it may not."""
    plain = models(name)[1]
    with patched(plain, profile_of(plain), strict=True) as model:
        yield model
        check_reasons(model, CASES[name])


def check_reasons(model: Any, case: Case) -> None:
    rows = explain(model)
    assert rows, "the model was not called"
    for layer, reason in enumerate(case.reasons):
        ran = {(row["path"], row["reason"]) for row in rows if row["layer"] == layer}
        if reason in SILENT:
            assert not ran
        elif reason == RUNS:
            assert all((path == "s2o") == (why == RUNS) for path, why in ran)
        else:
            assert ran == {("dense", reason)}


def left_out(model: Any) -> None:
    model(prompt(LENGTH))  # its paths are checked after every test
    pytest.skip("this version of transformers does not do it as the newer ones do")


def ran_s2o(model: Any) -> set[int]:
    return {row["layer"] for row in explain(model) if row["path"] == "s2o"}


def must_run(name: str) -> set[int]:
    return {layer for layer, reason in enumerate(CASES[name].reasons) if reason == RUNS}


def check_batch(model: Any, eager: Any, ids: torch.Tensor, mask: torch.Tensor) -> None:
    ours, theirs = model(ids, attention_mask=mask).logits, eager(ids, attention_mask=mask).logits
    close(ours[mask == 1], theirs[mask == 1])


def in_pieces(model: Any, ids: torch.Tensor, edges: Sequence[int], memory: Any) -> torch.Tensor:
    return torch.cat([model(ids[:, a:b], past_key_values=memory).logits for a, b in pairwise(edges)], 1)


def expected_of_pieces(name: str, eager: Any, ids: torch.Tensor, edges: Sequence[int], memory: Any) -> torch.Tensor:
    """Return eager attention of the whole prompt; of the same pieces where a layer's linear attention, which is
    transformers' own, goes through a piece in another way than through the whole, with another rounding."""
    return in_pieces(eager, ids, edges, memory) if LINEAR in CASES[name].reasons else eager(ids).logits


def new_cache(kind: str, config: PreTrainedConfig) -> Any:
    return DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=LENGTH + 20)


@torch.no_grad()
@pytest.mark.parametrize("name", WINDOWED)
def test_windows_and_caps_matter_at_these_sizes(name, eager):
    """Otherwise the other tests would not see one that was dropped: SDPA drops caps, wide windows hide nothing."""
    ids = prompt(LENGTH)
    config = copy.deepcopy(eager.config)
    text = config.get_text_config()
    text.sliding_window = 2 * LENGTH if text.sliding_window else None
    text.attn_logit_softcapping = None
    assert (twin(eager, "eager", config)(ids).logits - eager(ids).logits).abs().max() > 0.1


@torch.no_grad()
def test_prefill(name, eager, model):
    ids = prompt(LENGTH)
    close(model(ids).logits, eager(ids).logits)
    rows = {(row["layer"], row["path"], row["reason"], row["calls"]) for row in explain(model)}
    reasons = [(layer, why) for layer, why in enumerate(CASES[name].reasons) if why not in SILENT]
    assert rows == {(layer, "s2o" if why == RUNS else "dense", why, 1) for layer, why in reasons}


@torch.no_grad()
@pytest.mark.parametrize(("name", "others"), [(name, case.others) for name, case in CASES.items() if case.others])
def test_layers_of_other_kinds(name, others, eager, model):
    """They have no row in the profile, are counted, and stay what they are."""
    ids = prompt(70)  # more than a window, so that it hides keys
    close(model(ids).logits, eager(ids).logits)
    assert explain(model).others == others
    assert str(explain(model)).endswith(f"layers of other kinds, which stay what they are: {others}")
    assert geometry(model.config).decoder_layers - geometry(model.config).layers == 1


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch(name, eager, model, side):
    check_batch(model, eager, *padded_batch(side, LENGTH))
    assert ran_s2o(model) == must_run(name)


@torch.no_grad()
@pytest.mark.parametrize(("cuts", "cache"), [((90,), "dynamic"), ((40, 107), "static")], ids=["dynamic", "static"])
def test_chunked_prefill_and_decode(name, eager, model, cuts, cache):
    if CASES[name].broken == "a cache" or (CASES[name].broken == "a static cache" and cache == "static"):
        left_out(model)
    ids, edges = prompt(LENGTH), [0, *cuts, LENGTH - 1, LENGTH]
    ours = in_pieces(model, ids, edges, new_cache(cache, model.config))
    close(ours, expected_of_pieces(name, eager, ids, edges, new_cache(cache, eager.config)))
    assert ran_s2o(model) == must_run(name)


@torch.no_grad()
def test_prefix_cache(name, eager, model):
    """Two prompts that begin alike: the common part is prefilled once."""
    if CASES[name].broken == "a cache":
        left_out(model)
    common, prefix = prompt(90), DynamicCache(config=model.config)
    model(common, past_key_values=prefix)
    for length in (1, 60):
        rest = prompt(length)
        ours = model(rest, past_key_values=copy.deepcopy(prefix)).logits
        ids, edges = torch.cat([common, rest], 1), [0, 90, 90 + length]
        theirs = expected_of_pieces(name, eager, ids, edges, DynamicCache(config=eager.config))
        close(ours, theirs[:, 90:])
    assert ran_s2o(model) == must_run(name)


@torch.no_grad()
@pytest.mark.parametrize(
    "how",
    [{}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 3}, {"do_sample": True}],
    ids=["greedy", "static", "beams", "sampling"],
)
def test_generate(name, eager, model, how):
    if "cache_implementation" in how and CASES[name].broken.endswith("a static cache"):
        left_out(model)
    ids, mask = padded_batch(length=LENGTH)

    def run(which: Any) -> torch.Tensor:
        torch.manual_seed(5)
        return which.generate(ids, attention_mask=mask, max_new_tokens=4, **{"do_sample": False} | how)

    assert torch.equal(run(model), run(eager))
    assert ran_s2o(model) == must_run(name)


@torch.no_grad()
@pytest.mark.parametrize("name", QUANTISED_CACHES)
def test_quantised_cache(name, eager, model):
    """Transformers' quantised cache takes no sliding windows. `make architectures` brings a backend along."""
    backend = "quanto" if is_optimum_quanto_available() else "hqq" if is_hqq_available() else None
    if backend is None:
        model(prompt(LENGTH))
        pytest.skip("no backend of transformers' quantised cache is installed: optimum-quanto or hqq")

    ids = prompt(LENGTH)

    def run(which: Any) -> torch.Tensor:
        memory = QuantizedCache(backend, which.config, nbits=8 if backend == "hqq" else 4)
        return torch.cat([which(part, past_key_values=memory).logits for part in ids.split((100, 50), 1)], 1)

    ours, theirs = run(model), run(eager)
    close(ours[:, :100], theirs[:, :100])
    assert (ours - theirs).abs().mean() < 0.05 * theirs.abs().mean()  # a rounding that flips is a whole step
    assert ran_s2o(model) == must_run(name)


def test_gradients_go_dense(name, eager, model):
    """S2O has no backward pass: such a call is dense, says so, and its gradients are those of the dense model."""
    ids = prompt(LENGTH)
    gradients = []
    for which in (model, eager):
        which.zero_grad()
        which(ids, labels=ids).loss.backward()
        gradients.append(which.get_input_embeddings().weight.grad.clone())
        which.zero_grad()
    close(*gradients)
    assert not ran_s2o(model)
    reasons = {"gradients are enabled" if why == RUNS else why for why in CASES[name].reasons if why not in SILENT}
    assert {row["reason"] for row in explain(model)} == reasons


@torch.no_grad()
def test_unpatch_restores_exactly(name):
    model, ids = models(name)[1], prompt(LENGTH)
    implementation = model.config._attn_implementation
    before, modules = model(ids).logits, [dict(module.__dict__) for module in model.modules()]
    with patched(model, profile_of(model, tau=2.0)):
        changed = not torch.equal(model(ids).logits, before)
    assert changed
    assert torch.equal(model(ids).logits, before)
    assert model.config._attn_implementation == implementation
    assert [module.__dict__.keys() for module in model.modules()] == [attributes.keys() for attributes in modules]
    with pytest.raises(ModelError, match="the model is not patched"):
        explain(model)


@torch.no_grad()
def test_loaded_by_name_without_a_profile(name, eager, info_log):
    """Such a model is dense, says so, and takes a profile later."""
    s2o_runtime.register()
    model, ids = twin(eager, "s2o"), prompt(LENGTH)
    log_once.cache_clear()
    close(model(ids).logits, eager(ids).logits)
    check_batch(model, eager, *padded_batch(length=LENGTH))
    assert info_log.text.count("runs dense: the model has no profile") == 1
    patch(model, profile_of(model), strict=True)
    close(model(ids).logits, eager(ids).logits)
    check_reasons(model, CASES[name])
    assert unpatch(model).config._attn_implementation == "s2o"


@torch.no_grad()
@pytest.mark.parametrize("name", all_but_first(COMPILED, EXHAUSTIVE))
def test_compiled(name, eager, model, monkeypatch):
    """One of each architecture; experts as a batched product, the only one that torch.compile follows in float32."""
    torch.compiler.reset()  # what was compiled of other models counts towards its limit
    monkeypatch.setattr(model.config, "_experts_implementation", "batched_mm")
    ids = prompt(LENGTH)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        close(compiled(ids, past_key_values=DynamicCache(config=model.config)).logits, eager(ids).logits)
    assert ran_s2o(model) == must_run(name)
    assert [row["calls"] for row in explain(model)] == [3, 3]


def calibrated(model: Any, folder: Path) -> Profile:
    """The profile that a model in memory is calibrated to, with a budget that makes S2O worth its ranking."""
    loaded, out = from_memory(model, tiny_tokenizer(), "tiny"), folder / "profile.safetensors"
    options = {"model": "tiny", "out": out, "budget_rel_mse": 0.5, "lengths": (512,), "segments": (64,)}
    options |= {"lookbacks": (64,), "trials": 1}
    options |= {"num_prompts": 1, "num_held_out": 1, "num_certify": 0, "worst_rows": None}
    pipeline.calibrate(Recipe.from_options(options | {"hide_needles": False}), progress=False, loaded=loaded)
    return load_profile(out)


def check_calibration(model: Any, eager: Any, name: str, folder: Path) -> None:
    """A model's profile has rows for its layers of full attention, in which S2O skips something; with tau = 0 the
    patched model equals the eager one."""
    profile = calibrated(model, folder)
    assert profile.geometry == geometry(model.config)
    numbers = [profile.geometry.get_layer_number(row) for row in range(profile.geometry.layers)]
    assert set(numbers) == must_run(name)
    proven = read_record(profile).held_out[0].layers
    assert len(proven) == len(numbers)
    assert any(layer.density < 0.97 and 0 < layer.rel_mse <= 0.5 for layer in proven)
    ids = prompt(512)
    with torch.no_grad():
        with patched(model, profile, strict=True):
            model(ids)
            assert ran_s2o(model) <= must_run(name)
            assert ran_s2o(model)
        with patched(model, profile_of(model), strict=True):
            close(model(ids).logits, eager(ids).logits)


def test_calibrates(name, tmp_path):
    eager, model = models(name)
    check_calibration(model, eager, name, tmp_path)


@pytest.mark.parametrize("name", all_but_first(CASES, EXHAUSTIVE))
def test_quantised_weights(name, tmp_path):
    """Weights in 8 bits: the quantised model's own eager attention is what the patched one must equal."""
    if not is_optimum_quanto_available():
        pytest.skip("no package that quantises weights on a CPU is installed: optimum-quanto")
    from optimum.quanto import freeze, qint8, quantize

    eager, model = copy.deepcopy(models(name))
    for quantised in (eager, model):
        quantize(quantised, weights=qint8, exclude="*router*")
        freeze(quantised)
    assert fingerprint(model) == fingerprint(eager) != fingerprint(models(name)[0])
    check_calibration(model, eager, name, tmp_path)


@torch.no_grad()
def test_the_text_part_of_a_model_with_images():
    """The text part has the profile; queries that see a whole image at once go dense; parts get back what they had."""
    config = CASES["gemma3-vision"].config
    config.image_token_id, config.mm_tokens_per_image = 127, 4
    model = get_model_class(config).from_config(config, attn_implementation="eager").eval()
    model.set_attn_implementation({"vision_config": "sdpa"})
    ids, only_text = prompt(LENGTH).clamp_max(124), prompt(LENGTH).clamp_max(124)
    ids[0, 40:44] = 127
    image = {"pixel_values": torch.randn(1, 3, 28, 28), "token_type_ids": (ids == 127).long()}
    expected, expected_text = model(ids, **image).logits, model(only_text).logits
    with patched(model, profile_of(model), strict=True):
        close(model(only_text).logits, expected_text)
        check_reasons(model, CASES["gemma3"])
        assert ran_s2o(model) == {1}
    with patched(model, profile_of(model), strict=True):
        close(model(ids, **image).logits, expected)
        assert {row["reason"] for row in explain(model)} == {SLIDING, "the mask is not a plain causal one"}
    patch(model, profile_of(model))
    unpatch(model.model.language_model)  # takes it from the whole model
    assert model.config._attn_implementation == model.config.text_config._attn_implementation == "eager"
    assert model.config.vision_config._attn_implementation == "sdpa"
