"""S2O can serve an architecture, or the self-test says why it cannot."""

import copy
import math
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_map
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig

from calibrate.model import self_test as module
from calibrate.model.models import from_memory
from calibrate.model.self_test import run_self_test
from s2o_runtime.errors import ModelError
from s2o_runtime.huggingface import hf
from support.architectures import CASES
from support.models import CONFIGS, SIZES, save, stream
from support.tiny import tiny_tokenizer


def loaded(config=None):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config or CONFIGS["llama"])).eval()
    return from_memory(model, tiny_tokenizer(), "tiny")


def test_a_model_is_left_as_it_was():
    held = loaded()
    held.model.set_attn_implementation("sdpa")
    before = [dict(part.__dict__) for part in held.model.modules()]
    run_self_test(held)
    assert held.model.config._attn_implementation == "sdpa"
    for part, attributes in zip(held.model.modules(), before, strict=True):
        assert part.__dict__.keys() == attributes.keys()
        assert not part._forward_hooks


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "gemma2", "deepseek-v3"])  # sinks, caps, other value head dims
def test_large_scores_in_16_bits_are_no_obstacle(name):
    """Eager attention in bfloat16 would be off by percents of its weights, as in models of large scores (Qwen2.5)."""
    held = loaded(CASES[name].config)
    for part, parameter in held.model.named_parameters():
        if "q_proj" in part or "k_proj" in part:
            parameter.data *= 30
    run_self_test(replace(held, model=held.model.to(torch.bfloat16)))


def test_a_streamed_model_is_tested_as_far_as_its_first_layer_of_full_attention(tmp_path, monkeypatch):
    """Its parameters are back on meta after it."""
    streamed = stream(save("llama", tmp_path), False)
    ran = set()
    original = module._Comparison.attention

    def attention(self, part, *arguments, **named):
        ran.add(part.layer_idx)
        return original(self, part, *arguments, **named)

    monkeypatch.setattr(module._Comparison, "attention", attention)
    run_self_test(streamed)
    assert ran == {0}
    assert all(parameter.is_meta for parameter in streamed.model.parameters())


def hand_copies(layer, arguments, named):
    """Let a decoder layer get copies of all it is called with, as accelerate hands them to a layer on another GPU."""
    return tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, (arguments, named))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_a_layer_that_gets_a_copy_of_the_mask_passes(name, monkeypatch):
    """S2O gets a copy of it too, of which nothing but the numbers is left, as when the model is patched."""
    held = loaded(CASES[name].config)
    for layer in held.model.model.layers:
        layer.register_forward_pre_hook(hand_copies, with_kwargs=True)
    recovered, original = set(), hf._read_prefill

    def counted(mask, *sizes):
        if hf.is_prefill_mask(mask):
            recovered.add((int(mask[..., 0].max()), int(mask[..., 1].max())))
        return original(mask, *sizes)

    monkeypatch.setattr(hf, "_read_prefill", counted)
    run_self_test(held)
    assert any(start for _, start in recovered)  # of the padded prompt
    assert any(offset for offset, _ in recovered)  # of the second chunk


def compute_with(change):
    """Let Llama's own eager attention compute something else than plain causal attention."""

    def install(held, monkeypatch):
        file = sys.modules["transformers.models.llama.modeling_llama"]
        original = file.eager_attention_forward

        def changed(part, query, key, value, mask, **named):
            return original(part, query, key, value, mask if mask is None else change(part, mask), **named)

        monkeypatch.setattr(file, "eager_attention_forward", changed)

    return install


def slopes(part, mask):
    """As in ALiBi, of one layer only."""
    return mask - 0.3 * torch.arange(mask.shape[-1]).flip(0) if part.layer_idx == 1 else mask


def beyond_the_mask(held, monkeypatch):
    """Layer 1 hides one key more than the model's mask says: S2O's form of that mask is not for it."""

    def hook(layer, arguments, named):
        mask = named["attention_mask"].clone()
        mask[..., 5:, 3] = torch.finfo(mask.dtype).min
        return arguments, named | {"attention_mask": mask}

    held.model.model.layers[1].register_forward_pre_hook(hook, with_kwargs=True)


def around_the_function(held, monkeypatch):
    held.model.model.layers[1].self_attn.forward = lambda hidden_states, **named: (hidden_states, None)


def infinite_weight(held, monkeypatch):
    """Of the last layer, which is not taken for another kind of attention."""
    held.model.model.layers[1].mlp.down_proj.weight.data[3, 5] = math.inf


SEEING_AHEAD = LlamaConfig(**SIZES)
SEEING_AHEAD.is_causal = False


@pytest.mark.parametrize(
    ("config", "change", "refusal"),
    [
        (None, compute_with(lambda part, mask: mask[:1]), r"layer 0 is not plain causal attention \(padded prompt"),
        (None, compute_with(slopes), r"layer 1 is not plain causal attention \(whole prompt: its output differs"),
        (None, beyond_the_mask, r"layer 1 is not plain causal attention \(whole prompt: its output"),
        (None, around_the_function, r"layer 1 cannot run S2O \(it does not call transformers' attention function"),
        (None, infinite_weight, "model.layers.1.mlp.down_proj.weight holds inf: check that the model's weights are"),
        (SEEING_AHEAD, None, r"layer 0 cannot run S2O|layer 0 is not plain causal attention"),
        # which knows no KV heads and no head dim of its own
        (CONFIG_MAPPING["gpt_neox"](**SIZES), None, "layer 0 has 4 query heads, 4 KV heads and a head dim of 16, its"),
    ],
    ids=["unpadded", "slopes", "mask", "function", "weights", "causality", "sizes"],
)
def test_a_model_that_s2o_cannot_serve_is_refused(config, change, refusal, monkeypatch):
    held = loaded(config)
    if change:
        change(held, monkeypatch)
    with pytest.raises(ModelError, match=f"^{refusal}"):
        run_self_test(held)
