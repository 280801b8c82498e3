"""Small models that no checkpoint holds, and profiles for them."""

import copy
import pickle

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config

from calibrate.model.models import LoadedModel
from calibrate.model.weights import Checkpoint, Weights, build_skeleton, get_model_class
from s2o_runtime import explain, patch, unpatch
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.huggingface.hf import get_layer_states
from s2o_runtime.identity import fingerprint, geometry
from s2o_runtime.profile import Profile
from s2o_runtime.reference.dense import exact_attention

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class _Fresh(dict):  # configurations by name, a copy each time: to patch a model changes its configuration
    def __getitem__(self, name):
        return copy.deepcopy(super().__getitem__(name))


CONFIGS = _Fresh(llama=LlamaConfig(**SIZES), qwen2=Qwen2Config(**SIZES))
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 64}
MODELS = _Fresh(CONFIGS, tied=LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=SCALED))
ARCHITECTURES = tuple(sorted(MODELS))
CPU = torch.device("cpu")
LENGTH = 200  # tokens of a prompt
RUNS = "reference backend, no GPU"  # which is why the reference runs, not the kernel


def new_model(name="llama", implementation="sdpa", **changes):
    """The model of `CONFIGS` with that name and random weights, and with changes of its configuration."""
    config = CONFIGS[name]
    for field, value in changes.items():
        setattr(config, field, value)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


@torch.no_grad()
def watch(model, profile, ids):
    """The logits of a model that is patched for one prompt, and of each layer: exact attention, its own, density."""
    patch(model, profile, strict=True)
    states, outputs = get_layer_states(model), {}

    def observe(layer, q, k, v, scoring, out):
        outputs[layer] = exact_attention(q, k, v, **scoring.arguments()), out

    for state in states:
        state.observer = observe
    logits = model(ids[None], use_cache=False).logits[0]
    densities = [1.0 if state.last is None else float(state.last.density.mean()) for state in states]
    unpatch(model)
    return logits, [(*outputs[index], density) for index, density in enumerate(densities)]


def prompt(length=LENGTH, batch=1):
    """Random tokens [batch, length], none of which is special."""
    return torch.randint(3, 128, (batch, length))


def twin(eager, implementation="sdpa", config=None):
    """A model with the same weights and another attention implementation, and with another configuration if given."""
    config = copy.deepcopy(config or eager.config)
    model = get_model_class(config).from_config(config, attn_implementation=implementation).eval()
    model.load_state_dict(eager.state_dict())
    return model


def make_profile(model, tau, min_length=100, last_rows=0):
    """A profile that uses one threshold for all heads, from `min_length` tokens on."""
    shape, tile = geometry(model.config), TileConfig(64, 32, 1, 4, 1)
    layer = LayerConfig.uniform(shape.query_heads, tau=tau, segment=64, tile=tile, lookback=64, last_rows=last_rows)
    buckets = (min_length, 8192)
    layers = ((layer,) * shape.layers,) * len(buckets)
    return Profile("tiny", shape, fingerprint(model), DeviceIdentity("cpu", "cpu"), buckets, layers)


def pickled(model):
    """The same model as another process loads it."""
    return pickle.loads(pickle.dumps(model))


def with_adapter(model):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))


def padded_batch(side="left", length=LENGTH):
    """Three prompts, of all tokens, of 57 fewer and of 10, padded at one side, and their mask."""
    ids = prompt(length, 3)
    mask = torch.ones_like(ids)
    mask[1, :57] = 0
    mask[2, : length - 10] = 0
    mask = mask if side == "left" else mask.flip(1)
    return ids.masked_fill(mask == 0, 0), mask


def paths(model):
    """Return what the patched model's layers ran since they were patched, and why."""
    return {(row["path"], row["reason"]) for row in explain(model)}


def used_s2o(model):
    return any(path == "s2o" for path, _ in paths(model))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def build(name):
    """The model of `MODELS` with that name and random weights, the same each time."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(MODELS[name], attn_implementation="sdpa").eval()
    for each in model.parameters():  # biases and norms too: zeros and ones would hide a mix-up
        torch.nn.init.normal_(each, std=0.25)
    return model


def save(name, folder, change=lambda model: None, **options):
    """Write the model of `MODELS` with that name to a folder, after `change` was applied to it."""
    model = build(name)
    change(model)
    model.save_pretrained(folder, **options)
    return folder


def stream(folder, resident, dtype=torch.float32):
    """A saved model without a tokenizer, as `models.load` gives it."""
    model = build_skeleton(AutoConfig.from_pretrained(folder), dtype, CPU)
    weights = Weights(model, checkpoint(folder), CPU, resident)
    return LoadedModel("tiny", model, None, geometry(model.config), weights.fingerprint, weights)


def checkpoint(folder):
    """The files of a folder, as the package reads a checkpoint."""
    return Checkpoint(lambda file: str(folder / file) if (folder / file).is_file() else None)
