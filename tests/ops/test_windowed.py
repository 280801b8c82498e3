"""Layers with a sliding window in long prompts: computed some rows at a time, without a mask of rows by keys."""

import pytest
import torch

from calibrate.model.weights import get_model_class
from s2o_runtime import explain, patched
from s2o_runtime.attention import compute
from s2o_runtime.attention.compute import window_attention
from s2o_runtime.call import Scoring
from s2o_runtime.huggingface import hf
from support.architectures import CASES, SLIDING, WINDOW, WINDOWED
from support.marks import all_but_first
from support.models import make_profile, twin

EXHAUSTIVE = pytest.mark.exhaustive(reason="further architectures, a second each")
LENGTH, CUT, PADDING = 150, 90, 37


def twins(name):
    """The eager model of an architecture, and one with the same weights."""
    torch.manual_seed(1)
    config = CASES[name].config
    eager = get_model_class(config).from_config(config, attn_implementation="eager").eval()
    return eager, twin(eager, None)


@pytest.fixture(params=all_but_first(WINDOWED, EXHAUSTIVE, count=4))
def pair(request, monkeypatch):
    """Twins in which no mask of windows is small, the second one patched."""
    eager, model = twins(request.param)
    monkeypatch.setattr(hf, "SMALL_MASK", 0)
    monkeypatch.setattr(compute, "ROWS", 32)  # several blocks of rows
    with patched(model, make_profile(model, 0.0, min_length=32), strict=True):
        yield eager, model


def tokens(*shape):
    return torch.randint(8, 120, shape, generator=torch.Generator().manual_seed(3))


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3 * float(theirs.abs().max()))


@torch.no_grad()
def test_models_with_windows_equal_their_eager_attention(pair, monkeypatch):
    """A whole prompt, a padded batch, two chunks and what follows them; no mask of the whole prompt is made."""
    eager, model = pair
    ids = tokens(1, LENGTH)
    made = []
    for name in ("sdpa_mask", "eager_mask"):
        original = getattr(hf, name)
        monkeypatch.setattr(hf, name, lambda original=original, **call: made.append(call) or original(**call))
    calls = []
    original_attention = hf.window_attention
    monkeypatch.setattr(
        hf, "window_attention", lambda *tensors, **call: calls.append(call) or original_attention(*tensors, **call)
    )
    close(model(ids).logits, eager(ids).logits)
    assert made == []
    assert {call["window"] for call in calls} == {WINDOW}
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, :PADDING] = 0
    batch = tokens(2, LENGTH)
    close(model(batch, attention_mask=mask).logits[mask == 1], eager(batch, attention_mask=mask).logits[mask == 1])
    assert made == []
    assert calls[-1]["kv_start"] is not None
    logits = []
    for which in (model, eager):
        first = which(ids[:, :CUT], use_cache=True)
        logits.append(which(ids[:, CUT:], past_key_values=first.past_key_values, use_cache=True).logits)
    close(*logits)
    greedy = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(ids, **greedy), eager.generate(ids, **greedy))
    assert {row["reason"] for row in explain(model) if row["path"] == "dense"} >= {SLIDING}


@torch.no_grad()
@pytest.mark.parametrize("length", [WINDOW, WINDOW + 1])
def test_a_prompt_that_just_fits_a_window_and_one_that_does_not(length):
    """One token more than the window, and the last row must not see the first key."""
    eager, model = twins("ministral")
    config = eager.config
    hf.register()
    model.set_attn_implementation("s2o")
    ids = tokens(1, length)
    torch.testing.assert_close(model(ids).logits, eager(ids).logits, rtol=1e-4, atol=1e-4)
    call = {"q_length": length, "q_offset": 0, "local_size": WINDOW, "allow_is_causal_skip": True, "config": config}
    assert hf._is_plain_window(call) == (length == WINDOW)


@torch.no_grad()
def test_a_window_that_lost_its_attribute_is_recovered(monkeypatch):
    """As a tensor that was moved to another device has."""
    monkeypatch.setattr(hf, "SMALL_MASK", 0)
    eager, model = twins("ministral")
    hf.register()
    original = hf.s2o_mask
    monkeypatch.setattr(hf, "s2o_mask", lambda **call: original(**call).clone())
    hf.register()
    model.set_attn_implementation("s2o")
    close(model(tokens(1, LENGTH)).logits, eager(tokens(1, LENGTH)).logits)
    module = model.model.layers[0].self_attn
    q, k, v = (torch.randn(1, heads, LENGTH, 32) for heads in (4, 2, 2))
    mask = hf.prefill_mask(1, 0, window=WINDOW)
    dropped = hf.s2o_attention_forward(module, q, k, v, mask, scaling=0.2, dropout=1e-7)[0].transpose(1, 2)
    torch.testing.assert_close(dropped, window_attention(q, k, v, WINDOW, Scoring(0.2)), rtol=1e-4, atol=1e-5)
