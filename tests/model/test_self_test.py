"""What shows that S2O can serve an architecture, and what it says of one that it cannot."""

import copy
import math
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_map
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig

from calibrate.model import self_test as module
from calibrate.model.layers import decoder_layers
from calibrate.model.models import in_memory
from calibrate.model.self_test import self_test
from s2o_runtime.errors import ModelError
from s2o_runtime.huggingface import hf
from support.architectures import CASES
from support.models import CONFIGS, SIZES, save, stream
from support.tiny import tiny_tokenizer


def loaded(config=None):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config or CONFIGS["llama"])).eval()
    return in_memory(model, tiny_tokenizer(), "tiny")


def test_a_model_is_left_as_it_was():
    held = loaded()
    held.model.set_attn_implementation("sdpa")
    before = [dict(part.__dict__) for part in held.model.modules()]
    self_test(held)
    assert held.model.config._attn_implementation == "sdpa"
    for part, attributes in zip(held.model.modules(), before, strict=True):
        assert part.__dict__.keys() == attributes.keys()


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_large_scores_in_16_bits_are_no_obstacle(name):
    """Eager attention in bfloat16 would be off by percents of its weights, as in models of large scores (Qwen2.5)."""
    held = loaded(CASES[name].config)
    for part, parameter in held.model.named_parameters():
        if "q_proj" in part or "k_proj" in part:
            parameter.data *= 30
    self_test(replace(held, model=held.model.to(torch.bfloat16)))


def test_a_streamed_model_is_tested_as_far_as_its_first_layer_of_full_attention(tmp_path, monkeypatch):
    """Its parameters are back on meta after it."""
    streamed = stream(save("llama", tmp_path), False)
    ran = set()
    original = module._Comparison.attention

    def attention(self, part, *arguments, **named):
        ran.add(part.layer_idx)
        return original(self, part, *arguments, **named)

    monkeypatch.setattr(module._Comparison, "attention", attention)
    self_test(streamed)
    assert ran == {0}
    assert all(parameter.is_meta for parameter in streamed.model.parameters())


def hand_copies(model, number):
    """Let a decoder layer get copies of all it is called with, as accelerate hands them to a layer on another GPU."""

    def copied(value):
        return value.clone() if isinstance(value, torch.Tensor) else value

    def hook(layer, arguments, named):
        return tree_map(copied, arguments), tree_map(copied, named)

    model.model.layers[number].register_forward_pre_hook(hook, with_kwargs=True)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_a_layer_that_gets_a_copy_of_the_mask_passes(name, monkeypatch):
    """What S2O gets for it is a copy too, of which nothing but the numbers is left, as when the model is patched."""
    held = loaded(CASES[name].config)
    for number in range(len(decoder_layers(held.model))):
        hand_copies(held.model, number)
    recovered, original = set(), hf._recovered

    def counted(mask, *sizes):
        if hf.is_prefill_mask(mask):
            recovered.add((int(mask[..., 0].max()), int(mask[..., 1].max())))
        return original(mask, *sizes)

    monkeypatch.setattr(hf, "_recovered", counted)
    self_test(held)
    assert any(start for _, start in recovered)  # of the padded prompt
    assert any(offset for offset, _ in recovered)  # of the second chunk


def test_another_mask_is_no_copy_of_a_known_one(monkeypatch):
    """A layer that hides one key more than the model's mask says is not served by S2O's form of that mask."""
    held = loaded()

    def hook(layer, arguments, named):
        mask = named["attention_mask"].clone()
        mask[..., 5:, 3] = torch.finfo(mask.dtype).min
        return arguments, named | {"attention_mask": mask}

    held.model.model.layers[1].register_forward_pre_hook(hook, with_kwargs=True)
    with pytest.raises(ModelError, match=r"layer 1 is not plain causal attention \(whole prompt: its output"):
        self_test(held)


def unpadded(part, mask):
    """Ignores padding."""
    return mask[:1]


def slopes(part, mask):
    """As in ALiBi, of one layer only."""
    return mask - 0.3 * torch.arange(mask.shape[-1]).flip(0) if part.layer_idx == 1 else mask


@pytest.mark.parametrize(("change", "said"), [(unpadded, r"0 is .* \(padded"), (slopes, r"1 is .* \(whole")])
def test_another_mask_in_the_models_own_attention_is_noticed(change, said, monkeypatch):
    """Llama's own eager attention computes something else than plain causal attention."""
    file = sys.modules["transformers.models.llama.modeling_llama"]
    original = file.eager_attention_forward

    def changed(part, query, key, value, mask, **named):
        return original(part, query, key, value, mask if mask is None else change(part, mask), **named)

    monkeypatch.setattr(file, "eager_attention_forward", changed)
    said = said.replace(".*", "not plain causal attention")
    with pytest.raises(ModelError, match=rf"layer {said} prompt: its output differs"):
        self_test(loaded())


def test_a_model_that_sees_what_comes_after_is_refused():
    config = LlamaConfig(**SIZES)
    config.is_causal = False
    with pytest.raises(ModelError, match=r"layer 0 cannot run S2O|layer 0 is not plain causal attention"):
        self_test(loaded(config))


def test_a_layer_that_does_not_call_the_attention_function_is_refused(monkeypatch):
    held = loaded()
    attention = held.model.model.layers[1].self_attn
    monkeypatch.setattr(attention, "forward", lambda hidden_states, **named: (hidden_states, None))
    with pytest.raises(ModelError, match=r"layer 1 cannot run S2O \(it does not call transformers' attention function"):
        self_test(held)


def test_sizes_that_are_not_the_configurations_are_refused():
    config = CONFIG_MAPPING["gpt_neox"](**SIZES)  # which knows no KV heads and no head dim of its own
    with pytest.raises(ModelError, match="layer 0 has 4 query heads, 4 KV heads and a head dim of 16, its config"):
        self_test(loaded(config))


@pytest.mark.parametrize(("number", "part", "bad"), [(0, "self_attn.k_proj", math.nan), (1, "mlp.down_proj", math.inf)])
def test_weights_that_are_no_numbers_are_named(number, part, bad):
    """Not the layer behind them, and not as another kind of attention; also in the last layer."""
    held = loaded()
    with torch.no_grad():
        held.model.get_parameter(f"model.layers.{number}.{part}.weight")[3, 5] = bad
    name = "NaN" if math.isnan(bad) else "inf"
    with pytest.raises(ModelError, match=rf"^model.layers.{number}.{part}.weight holds {name}: check that the model's"):
        self_test(held)


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "deepseek-v3"])
def test_caps_sinks_and_other_value_head_dims_pass(name):
    self_test(loaded(CASES[name].config))
