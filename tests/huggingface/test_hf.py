"""Tests of what patching does to a transformers model; that outputs are eager's is in test_architectures.py."""

import copy
import dataclasses
import gc
import logging
import math
import os
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import count

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, DynamicCache, GPTNeoXConfig, MistralConfig

import s2o_runtime.huggingface.hf as hf
from s2o_runtime import explain, patch, unpatch
from s2o_runtime.config import LayerConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.errors import ConfigError, ModelError, ProfileError
from s2o_runtime.huggingface import layers
from s2o_runtime.huggingface.hf import get_layer_states
from s2o_runtime.logs import log_once
from support.architectures import CASES
from support.models import (
    LENGTH,
    SIZES,
    close,
    make_profile,
    new_model,
    paths,
    pickled,
    prompt,
    twin,
    used_s2o,
    with_adapter,
)
from support.naive import naive_attention


@pytest.fixture
def patched(eager):
    model = twin(eager)
    return patch(model, make_profile(model, 0.0), strict=True)


@pytest.fixture
def ids():
    return prompt()


@torch.no_grad()
def test_a_layer_whose_heads_are_all_dense_is_what_it_would_be_unpatched(eager, ids):
    """Without the op between: its checks would cost short prompts more time than they have to lose."""
    model = twin(eager)
    profile = make_profile(model, 0.0)
    dense = tuple(tuple(LayerConfig.uniform(4, mode="dense") for _ in bucket) for bucket in profile.layers)
    patch(model, dataclasses.replace(profile, layers=dense))
    close(model(ids).logits, eager(ids).logits)
    assert paths(model) == {("dense", "every head of the layer is dense")}
    assert all(state.last is None for state in get_layer_states(model))


@torch.no_grad()
def test_the_last_rows_of_each_call_are_dense(eager):
    """Of a whole prompt, and of a call that goes on with it: nobody says whether there is more to come."""
    model, seen = twin(eager), []
    patch(model, make_profile(model, 1e6, last_rows=128), drift=None)
    for state in get_layer_states(model):
        state.observer = lambda layer, q, k, v, scoring, out: seen.append((q, k, v, out))
    ids = prompt(700)
    cache = model(ids[:, :400], use_cache=True).past_key_values
    model(ids[:, 400:], past_key_values=cache)
    for q, k, v, out in seen:
        rows = q.shape[2]
        exact = (out - naive_attention(q, k, v)).abs().amax((0, 1, 3)) < 1e-5
        first = (rows - 128) // 64 * 64
        assert exact[first:].all()
        assert not exact[128:first].any()  # rows before see all keys: their own segment, and 64 before it
    assert [q.shape[2] for q, *_ in seen] == [400, 400, 300, 300]


@torch.no_grad()
def test_attention_weights_that_are_asked_for_are_said_to_be_none(patched, ids, caplog):
    log_once.cache_clear()
    for _ in range(2):
        assert not patched(ids, output_attentions=True).attentions
    assert [record.getMessage().partition(":")[0] for record in caplog.records if record.name == "s2o_runtime"] == [
        "S2O computes no attention weights, output_attentions=True gives none"
    ]


@torch.no_grad()
@pytest.mark.parametrize("mistake", [False, True])
def test_a_block_in_a_patched_model_gives_back_the_profile_before(eager, ids, mistake):
    model = twin(eager)
    implementation = model.config._attn_implementation
    patch(model, make_profile(model, 2.0))
    outer, states = model(ids).logits, get_layer_states(model)
    wrong = dataclasses.replace(make_profile(model, 0.0), fingerprint="0" * 64)
    with pytest.raises(ProfileError) if mistake else nullcontext(), hf.patched(model, wrong, strict=mistake):
        assert not torch.equal(model(ids).logits, outer)
    assert torch.equal(model(ids).logits, outer)
    assert [id(state) for state in get_layer_states(model)] == [id(state) for state in states]  # with what they counted
    for _ in range(2):
        assert unpatch(model).config._attn_implementation == implementation


@pytest.mark.parametrize(("bad", "name"), [(math.nan, "NaN"), (math.inf, "inf")])
def test_weights_that_are_no_numbers_are_named(bad, name, eager, caplog):
    model = twin(eager)
    profile = make_profile(model, 0.0)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.fill_(bad)
    sentence = f"model.layers.1.self_attn.k_proj.weight holds {name}: check that the model's weights are whole"
    with pytest.raises(ProfileError, match=f"^{sentence}"):
        patch(model, profile, strict=True)
    patch(model, profile)
    assert sentence in caplog.text


@torch.no_grad()
def test_a_gpu_profile_runs_on_a_cpu_and_a_foreign_one_stays_dense(eager, ids, monkeypatch):
    model = twin(eager)
    profile = make_profile(model, 2.0)
    patch(model, dataclasses.replace(profile, device=DeviceIdentity("cuda", "NVIDIA H200", (9, 0), 132, 1)))
    model(ids)
    assert used_s2o(model)
    monkeypatch.setattr("s2o_runtime.profile.profile.identify", lambda device: DeviceIdentity("xpu", "xpu"))
    patch(model, profile)
    close(model(ids).logits, eager(ids).logits)
    assert paths(model) == {("dense", "there is no kernel for xpu: the model stays dense")}


SLIDING = MistralConfig(**SIZES, sliding_window=48)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda model, p: patch(AutoModelForCausalLM.from_config(GPTNeoXConfig(**SIZES)), p), ProfileError,
         "it has architecture gpt_neox where the profile has llama"),
        (lambda model, p: patch(AutoModelForCausalLM.from_config(SLIDING), p), ModelError,
         "has no layer of full_attention, only 2 of sliding_attention"),
        (lambda model, p: patch(torch.nn.Linear(2, 2), p), ModelError, "Linear is not a transformers model"),
        (lambda model, p: explain(None), ModelError, "NoneType is not a transformers model"),
        (lambda model, p: patch("p.safetensors", model), ModelError,
         r"the model is a str and the profile a LlamaForCausalLM: swap them, patch\(model, profile\)"),
        (lambda model, p: hf.patched("p.safetensors", model).__enter__(), ModelError, "swap them"),
        (lambda model, p: patch(model, 5), ProfileError, "the profile is a int, expected a Profile or the path"),
        (lambda model, p: patch(model, p, strict="no"), ConfigError, "strict is 'no': expected true or false"),
    ],
)  # fmt: skip
def test_what_cannot_be_patched_is_refused_and_named(eager, call, error, words):
    model = twin(eager)
    with pytest.raises(error, match=words):
        call(model, make_profile(model, 0.0))
    assert model.config._attn_implementation == "sdpa"


@torch.no_grad()
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
@pytest.mark.parametrize("original", ["patched anew", "unpatched", "gone"])
def test_a_copy_runs_its_own_profile_compiled_too(eager, ids, duplicate, original):
    model = patch(twin(eager), make_profile(eager, 1e6), drift=None)
    other = duplicate(model)
    expected = model(ids).logits
    if original == "patched anew":
        patch(model, make_profile(eager, 0.0), drift=None)
    else:
        unpatch(model)
    if original == "gone":
        del model
        gc.collect()
    assert torch.equal(other(ids).logits, expected)
    torch.compiler.reset()
    compiled = torch.compile(other, backend="eager", fullgraph=True)
    close(compiled(ids, past_key_values=DynamicCache(config=other.config)).logits, expected)
    assert [row["calls"] for row in explain(other)] == [2, 2]
    if original == "patched anew":
        assert explain(model) == []
    assert unpatch(other).config._attn_implementation == "sdpa"
    close(other(ids).logits, eager(ids).logits)


@pytest.fixture
def next_process(monkeypatch):
    """A function after which keys are issued as in a process that begins."""
    return lambda: monkeypatch.setattr(layers, "_issued", defaultdict(count))


@torch.no_grad()
def test_a_graph_of_another_process_runs_a_layer_of_the_same_profile_or_none(eager, ids, next_process):
    """As one that torch.export wrote, or that a cache on the disk holds: its nodes have the keys of that process."""
    q, k, v = (torch.randn(1, heads, LENGTH, 64) for heads in (4, 2, 2))
    mask, profile = hf.prefill_mask(1, 0), make_profile(eager, 2.0)

    def run(key):
        return torch.ops.s2o_runtime.layer_attention(q, k, v, mask, None, key, 0.125, None)

    next_process()
    model = patch(twin(eager), profile, drift=None)
    key = get_layer_states(model)[1].key
    expected = run(key)
    del model
    next_process()
    for other in (make_profile(eager, 1.0), dataclasses.replace(profile, lengths=(101, 8192))):
        unrelated = patch(twin(eager), other, drift=None)
        gc.collect()
        with pytest.raises(ModelError, match="the model of this compiled graph is gone"):
            run(key)
        del unrelated
    same = patch(twin(eager), profile, drift=None)
    assert torch.equal(run(key), expected)
    assert [sum(state.counts.values()) for state in get_layer_states(same)] == [0, 1]
    patch(same, profile, drift=None)  # anew: a graph of before must be compiled again
    with pytest.raises(ModelError, match="the model of this compiled graph is gone"):
        run(key)


@pytest.mark.slow(reason="compiles in two processes")
def test_processes_run_a_saved_model_and_the_second_finds_what_the_first_compiled(eager, ids, tmp_path):
    """They know nothing of S2O until they load it."""
    model = patch(twin(eager), make_profile(eager, 1e6), drift=None)
    torch.save((model, ids), tmp_path / "model.pt")
    program = """if True:
        import torch
        model, ids = torch.load("model.pt", weights_only=False)
        with torch.no_grad():
            torch.save(model(ids).logits, "logits.pt")
        from s2o_runtime.huggingface.hf import prefill_mask, s2o_attention_forward
        mask, attention = prefill_mask(1, 0), model.model.layers[0].self_attn
        call = lambda q, k, v: s2o_attention_forward(attention, q, k, v, mask, scaling=0.125)[0]
        torch.compile(call, fullgraph=True)(*(torch.ones(1, heads, 200, 64) for heads in (4, 2, 2)))
        print(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
    """
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    where = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    for hits in ("0\n", "1\n"):
        assert subprocess.check_output([sys.executable, "-c", program], text=True, cwd=tmp_path, env=where) == hits
        with torch.no_grad():
            close(torch.load(tmp_path / "logits.pt"), model(ids).logits)


@pytest.mark.parametrize("other_first", [False, True], ids=["second", "first"])
@pytest.mark.parametrize(
    "wrap", [lambda model: model.model, torch.compile, with_adapter], ids=["part", "compiled", "peft"]
)
def test_any_handle_of_a_model_takes_the_profile_away(eager, wrap, other_first):
    model = twin(eager)
    model.config.attention_dropout = 0.1
    first = wrap(model) if other_first else model
    patch(first, make_profile(model, 2.0), drift=None)
    with torch.no_grad():
        model(prompt())
    assert [dict(row) for row in explain(model.model)] == [dict(row) for row in explain(model)] != []
    second = model if other_first else wrap(model)
    patch(second, make_profile(model, 2.0), drift=None)
    assert model.config._attn_implementation == "s2o"
    assert unpatch(second).config._attn_implementation == "sdpa"
    assert unpatch(first).config._attn_implementation == model.config._attn_implementation == "sdpa"
    model.train()(prompt(), labels=prompt()).loss.backward()


def test_merging_an_adapter_keeps_the_way_back(eager):
    wrapped = with_adapter(twin(eager))
    patch(wrapped, make_profile(eager, 2.0), drift=None)
    assert unpatch(wrapped.merge_and_unload()).config._attn_implementation == "sdpa"


TRAINING = {
    "plain": lambda run, hidden: run(hidden),
    "reentrant": lambda run, hidden: checkpoint(run, hidden, use_reentrant=True),
    "not-reentrant": lambda run, hidden: checkpoint(run, hidden, use_reentrant=False),
    "compiled": torch.compile(lambda run, hidden: run(hidden), backend="aot_eager"),
}


@pytest.mark.parametrize(
    ("mode", "how"),
    [("train", how) for how in TRAINING] + [("eval", how) for how in ("plain", "not-reentrant", "compiled")],
)
def test_the_gradient_is_of_the_function_that_ran(eager, ids, how, mode):
    """In training mode that is the dense one; in eval mode too, where the forward pass has gradients."""
    torch.compiler.reset()
    results = []
    for model in (patch(twin(eager), make_profile(eager, 1e6), drift=None), twin(eager)):
        getattr(model, mode)()
        hidden = model.get_input_embeddings()(ids).detach().requires_grad_()
        out = TRAINING[how](lambda hidden, model=model: model(inputs_embeds=hidden, use_cache=False).logits, hidden)
        out.square().mean().backward()
        results.append((out.detach(), hidden.grad, model.model.layers[0].self_attn.q_proj.weight.grad))
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs)
        assert theirs.abs().max() > 0


@torch.no_grad()
def test_training_mode_is_dense_without_gradients_too_and_said_once(eager, ids, caplog):
    """As a policy's old log-probabilities are computed; with the model's dropout."""
    model, dense = patch(twin(eager), make_profile(eager, 1e6), drift=None).train(), twin(eager).train()
    for dropout in (0.0, 0.3):
        outputs = []
        for which in (model, dense):
            for layer in which.model.layers:
                layer.self_attn.attention_dropout = dropout
            torch.manual_seed(3)
            outputs.append(which(ids).logits)
        close(*outputs)
    assert paths(model) == {("dense", "the model is in training mode")}
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "S2O does not run: the model is in training mode for a prompt of 200 keys: "
        "call model.eval() unless it is trained"
    ]


@torch.no_grad()
def test_a_mask_shorter_than_the_keys_hides_those_that_it_lacks(eager, patched, ids):
    """Of a whole prompt, and of the new tokens alone behind a cache."""
    ones = torch.ones_like(ids)
    cut = {"attention_mask": ones[:, :120]}
    close(patched(ids, **cut).logits, eager(ids, **cut).logits)
    outputs = []
    for model in (patched, eager):
        cache = model(ids[:, :150], use_cache=True).past_key_values
        outputs.append(model(ids[:, 150:], attention_mask=ones[:, 150:], past_key_values=cache).logits)
    close(*outputs)
    assert {row["reason"]: row["calls"] for row in explain(patched) if row["path"] == "dense"} == {
        "the attention mask has fewer entries than there are keys": 2
    }


ROW = torch.arange(LENGTH)
SEEN = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
PACKED = {"position_ids": (ROW % 120)[None], "use_cache": False}
NOT_PLAIN = {  # what the caller passes for a prompt of LENGTH tokens; such calls are dense
    "packed": PACKED,
    "holes": {"attention_mask": ((ROW < 40) | (ROW >= 60)).long()[None]},
    "4D, a prefix seen by all": {"attention_mask": (SEEN | (ROW < 50))[None, None]},
}
OTHERS = {
    "packed, a mask of ones": PACKED | {"attention_mask": torch.ones(1, LENGTH, dtype=torch.int64)},
    "numbered": {"attention_mask": (ROW // 70 + 1)[None]},
    "4D": {"attention_mask": SEEN[None, None]},
    "a row of padding alone": {"attention_mask": torch.tensor([[1], [0]]).repeat(1, LENGTH)},
} | {
    f"{pad} of {width} padded": {"attention_mask": (torch.arange(width) >= torch.tensor([[0], [pad]])).long()}
    for width in (161, 193)  # one more than a multiple of 32
    for pad in (1, 31, 64, width - 2)
}


@torch.no_grad()
@pytest.mark.parametrize("name", [*NOT_PLAIN, *OTHERS])
def test_masks_of_callers_give_what_the_stock_model_gives(eager, patched, name):
    inputs = (NOT_PLAIN | OTHERS)[name]
    mask = inputs.get("attention_mask", torch.ones(1, LENGTH))
    ids, real = prompt(mask.shape[-1], len(mask)), mask == 1 if "padd" in name else slice(None)
    ours, theirs = (model(ids, **inputs).logits[real] for model in (patched, twin(eager)))
    assert ours.isfinite().all()
    close(ours, theirs)
    if name in NOT_PLAIN:
        assert paths(patched) == {("dense", "the mask is not a plain causal one")}


@torch.no_grad()
def test_prompts_are_their_own_in_a_batch_and_beside_threads(eager):
    """While another thread reads the counters of all."""
    model, batch = patch(twin(eager), make_profile(eager, 2.0), drift=None), prompt(LENGTH, 3)
    alone = [model(row[None], use_cache=False).logits[0] for row in batch]
    close(model(batch, use_cache=False).logits, torch.stack(alone))

    def serve(number):
        with torch.no_grad():
            rows = [(number + turn) % 3 for turn in range(6)]
            return [torch.equal(model(batch[row][None], use_cache=False).logits[0], alone[row]) for row in rows]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            served = [pool.submit(serve, number) for number in range(3)]
            while not all(future.done() for future in served):
                assert "s2o" in str(explain(model))
    finally:
        sys.setswitchinterval(interval)
    assert all(all(future.result()) for future in served)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (1, 1, 1, 4)])
def test_a_mask_of_integers_that_a_caller_made_is_not_taken_for_one_of_s2o(patched, shape):
    cache = patched(prompt(shape[-1] - 1), use_cache=True).past_key_values
    for mask in (torch.ones(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match="attn_mask"):
            patched(prompt(1), attention_mask=mask, past_key_values=copy.deepcopy(cache))


@torch.no_grad()
def test_assisted_text_is_greedy_text_where_last_rows_are_exact(eager):
    """The rows that answer do not depend on the drafts behind them."""
    model = patch(twin(eager), make_profile(eager, 1e6, last_rows=256), drift=None)
    ids, options = prompt(150).repeat(1, 3), {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    greedy = model.generate(ids, **options)
    for how in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": new_model()}, {"cache_implementation": "static"}):
        assert torch.equal(model.generate(ids, **options, **how), greedy)
    assert used_s2o(model)


@torch.no_grad()
def test_a_compiled_layer_keeps_its_sinks_which_observers_get_without_gradients():
    """Sinks reach the op in every kind of call: gpt-oss shows it, in test_architectures.py."""
    model = AutoModelForCausalLM.from_config(CASES["gpt-oss"].config, attn_implementation="eager").eval()
    patch(model, make_profile(model, 0.0), drift=None)
    attention, seen = model.model.layers[1].self_attn, []
    attention.sinks.data = torch.linspace(-1, 4, 4)
    get_layer_states(model)[0].observer = lambda layer, q, k, v, scoring, out: seen.append(scoring.sinks)
    q, k, v = (torch.randn(1, heads, 150, 32) for heads in (4, 2, 2))
    mask = hf.prefill_mask(1, 0)

    def call(q, k, v):
        return hf.s2o_attention_forward(attention, q, k, v, mask, scaling=0.3, s_aux=attention.sinks)[0]

    torch.compiler.reset()
    expected = naive_attention(q, k, v, scale=0.3, sinks=attention.sinks)
    for run in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        torch.testing.assert_close(run(q, k, v).transpose(1, 2).double(), expected, rtol=1e-4, atol=1e-5)
    assert [sinks.requires_grad for sinks in seen] == [False, False]
