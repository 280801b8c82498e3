"""transformers' continuous batching with a patched model: what it generates, against plain forward passes."""

import inspect
import random
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from s2o_runtime import explain, patch, unpatch
from s2o_runtime.errors import ModelError
from s2o_runtime.huggingface import sdpa
from s2o_runtime.huggingface.paged import split_requests
from support.architectures import CASES, RUNS
from support.environment import restore_sdpa
from support.marks import all_but_first
from support.models import make_profile, new_model, twin

if not hasattr(transformers, "ContinuousBatchingConfig"):
    pytest.skip("this transformers has another form of continuous batching", allow_module_level=True)
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache as transformers_cache
from transformers.generation.continuous_batching import continuous_api

NAMED = pytest.mark.skipif(
    "is not supported for continuous batching" in inspect.getsource(continuous_api),
    reason="this transformers' continuous batching takes SDPA and FlashAttention by their names only",
)
SLOW = pytest.mark.slow(reason="more models, or the demo model at 1600 tokens")
LENGTHS = (150, 97, 64, 20)  # of prompts
SHORTEST = 32  # keys that S2O computes
NEW = 3  # tokens


@pytest.fixture(autouse=True)
def _memory(monkeypatch):
    """transformers asks psutil, which the project does not need, how much memory a CPU has."""
    monkeypatch.setattr(
        transformers_cache, "get_device_and_memory_breakdown", lambda: (torch.device("cpu"), 8 << 30, 0, 0)
    )


def batching(tokens):
    """Return how transformers generates, in batches of at most `tokens` new tokens."""
    config = ContinuousBatchingConfig(block_size=16, num_blocks=512, max_batch_tokens=tokens, return_logprobs=True)
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return {"generation_config": generation, "continuous_batching_config": config}


def generated(model, prompts, tokens=64):
    """The requests' results, in the order of the prompts."""
    results = model.generate_batch(prompts, **batching(tokens), progress_bar=False)
    by_prompt = {tuple(result.prompt_ids): result for result in results.values()}
    return [by_prompt[tuple(prompt)] for prompt in prompts]


def prompts_of(lengths=LENGTHS, seed=3):
    rng = random.Random(seed)
    return [[rng.randrange(3, 128) for _ in range(length)] for length in lengths]


def check(model, prompts, results):
    """Every token is the likeliest of a plain forward pass, with its log-probability."""
    for prompt, result in zip(prompts, results, strict=True):
        tokens = result.generated_tokens
        assert len(tokens) == NEW, result.error
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1)[torch.arange(NEW), tokens]
        torch.testing.assert_close(torch.tensor(result.logprobs[-NEW:]), expected, rtol=1e-3, atol=1e-3)
        assert logits.argmax(-1).tolist() == tokens


def rows_of(model, layer):
    return {(row["path"], row["reason"]) for row in explain(model) if row["layer"] == layer}


@NAMED
@torch.no_grad()
@pytest.mark.parametrize("name", all_but_first(["llama", "gpt-oss", "ministral", "gemma2"], SLOW, count=2))
def test_a_model_that_never_stops_generates_what_it_would(name):
    """Chunks of prompts beside single tokens; windows, soft caps and sinks."""
    torch.manual_seed(1)
    case = CASES[name]
    eager = AutoModelForCausalLM.from_config(case.config, attn_implementation="eager").eval()
    model = twin(eager, "eager")
    patch(model, make_profile(model, 0.0, min_length=SHORTEST))
    prompts = prompts_of()
    results = generated(model, prompts)
    check(eager, prompts, results)
    short, fits = f"shorter than the shortest calibrated length, {SHORTEST}", "the prompt so far fits one segment"
    for layer, reason in enumerate(case.reasons):
        rows = rows_of(model, layer)
        if reason == RUNS:
            assert rows == {("s2o", RUNS), ("dense", "decode"), ("dense", short), ("dense", fits)}
        else:
            assert {path for path, _ in rows} == {"dense"}
    assert model.config._attn_implementation == "s2o"  # transformers puts it back


@NAMED
@torch.no_grad()
def test_a_prompt_that_shares_its_prefix_brings_a_tail(eager):
    """The second's first blocks are the first's; its few new tokens stand behind them."""
    model = patch(twin(eager), make_profile(eager, 0.0, min_length=SHORTEST))
    first, rest = prompts_of((160, 20))
    prompts = [first, first[:128] + rest]
    fed = []
    forward = model.forward
    model.forward = lambda **inputs: fed.append(inputs["input_ids"].shape[1]) or forward(**inputs)
    with model.continuous_batching_context_manager(**batching(160)) as manager:
        results = []
        for prompt in prompts:
            name = manager.add_request(prompt, max_new_tokens=NEW)
            results.append(manager.get_result(name, timeout=60))
    check(eager, prompts, results)
    assert fed[-NEW] == 20


@NAMED
@torch.no_grad()
def test_work_is_skipped_and_measured():
    model = new_model(implementation="eager")
    prompts = prompts_of((300, 250))
    whole = generated(patch(model, make_profile(model, 0.0)), prompts, tokens=300)
    sparse = generated(patch(model, make_profile(model, 2.0)), prompts, tokens=300)
    densities = [row["density"] for row in explain(model) if row["path"] == "s2o"]
    assert densities
    assert all(density < 0.9 for density in densities)
    assert [result.logprobs for result in whole] != [result.logprobs for result in sparse]
    unpatch(model)
    assert model.config._attn_implementation == "eager"


@pytest.fixture
def profile(eager):
    return make_profile(eager, 0.0, min_length=SHORTEST)


@torch.no_grad()
def test_programs_that_s2o_run_starts_have_it_under_the_name_of_sdpa(eager, taken_over):
    model = twin(eager)
    prompts = prompts_of()
    check(eager, prompts, generated(model, prompts))
    assert {("s2o", RUNS), ("dense", "decode")} <= rows_of(model, 0)


@torch.no_grad()
def test_models_that_the_profile_is_not_of_have_transformers_own(taken_over, monkeypatch):
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(CASES["qwen2"].config, attn_implementation="sdpa").eval()
    prompts = prompts_of()
    monkeypatch.setattr(sdpa, "s2o_paged_forward", None)  # is not called
    ours = generated(model, prompts)
    restore_sdpa()
    assert [result.logprobs for result in ours] == [result.logprobs for result in generated(model, prompts)]


def batch(cache, queries, keys, **changes):
    """Return what transformers passes to every layer: the edges of the requests' queries and keys, and the cache."""
    edges = {
        "cu_seq_lens_q": torch.tensor(queries, dtype=torch.int32),
        "cu_seq_lens_k": {"full_attention": torch.tensor(keys, dtype=torch.int32)},
    }
    return {"cache": cache, "read_index": [None], "write_index": [None], "block_table": None} | edges | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("no batch", "it is for generate_batch"),
        ({"block_table": torch.zeros(1, 1, 1)}, "pass max_blocks_per_request=0"),
        ({"compiling": True}, "use_cuda_graph=False"),
    ],
)
def test_what_is_no_batch_for_s2o_is_refused(changes, message, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: "compiling" in changes)
    forward, query = split_requests(lambda *_: None), torch.zeros(1, 1, 1, 1)
    arguments = {} if changes == "no batch" else batch(None, [0, 1], [0, 1], **changes)
    with pytest.raises(ModelError, match=message):
        forward(SimpleNamespace(layer_idx=0), query, None, None, None, **arguments)
