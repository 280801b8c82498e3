"""A model's identity: its geometry, and a fingerprint of what it computes (weights, adapters, RoPE, config.json)."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from .errors import ModelError
from .fields import pluralize
from .layer_kinds import FULL, get_text_config, list_layer_kinds

SAMPLES_PER_TENSOR = 64
RANDOM = "random-"  # how the fingerprint of random weights starts
# parts of a fingerprint behind the hash of the weights, in this order; the last two are fields of their own in a file
ROPE, ADAPTERS, BASE, CONFIG = "+rope-", "+adapters-", "+base-", "+config-"
HEADS = ("lm_head.", "embed_out.")  # how parameters of a language model's head begin, which a base model lacks
OTHER_HEADS = ("score.", "classifier.", "qa_outputs.")  # those of another head, which is not in the weights' hash
# what wrappers add to names of parameters and modules: PEFT, torch.compile, FSDP and checkpointing
WRAPPERS = re.compile(r"^base_model\.model\.|\b(_orig_mod|base_layer|original_module|_fsdp\w+|_checkpoint\w+)\.")
# Fields of config.json, by patterns of their names, that do not decide what the same weights compute: names, tokens and
# labels; types, caches, attention implementation and output; training; what geometry, shapes of weights and RoPE
# parameters have already, under names that differ between versions.
WITHOUT_EFFECT = re.compile(
    r"_.*|architectures|auto_map|model_type|name_or_path|.*_version|tokenizer_class|prefix|.*_plan|"
    r".*_token_(id|index)|(bos|eos|pad|unk|sep)_token|id2label|label2id|num_labels|problem_type|finetuning_task|"
    r"(torch_)?dtype|use_cache|cache_implementation|attn_impl.*|output_(attentions|hidden_states|router_logits|scores)|"
    r".*return_dict|torchscript|num_logits_to_keep|chunk_size_feed_forward|mamba_chunk_size|pretraining_tp|quant.*_config|"
    r".*dropout.*|.*_pdrop|.*initializer_.*|.*init_std|.*aux_loss.*|router_jitter_noise|gradient_.*|summary_.*|"
    r"num_hidden_layers|num_attention_heads|num_key_value_heads|head_dim|n_(head|layer|positions)|vocab_size|"
    r"num_(local_)?experts|n_routed_experts|tie_.*|is_(encoder_)?decoder|add_cross_attention|sliding_window_pattern|"
    r"rope_(parameters|scaling|theta|local_base_freq)|partial_rotary_factor|ignore_keys_at_rope_validation"
)
BY_POSITIONS = re.compile("dynamic|longrope")  # kinds of RoPE that depend on `max_position_embeddings`
SHOWN = 60  # characters of a value in a message
PACKED, SCALES = frozenset({"qweight", "qzeros"}), "scales"  # buffers of a linear layer in GPTQ's and AWQ's formats
# safetensors' names of the types that torch has, and torch's
STORED_TYPES = {
    "F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16", "BOOL": "bool", "C64": "complex64",
    "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


@dataclass(frozen=True)
class Geometry:
    """The sizes of a model that shape a profile's tables."""

    architecture: str  # the type of the model's text part
    layers: int  # of full attention, which alone have rows in tables
    query_heads: int
    kv_heads: int
    head_dim: int
    layer_numbers: tuple[int, ...] = ()  # of these layers in the decoder, ascending; empty if they are all of it
    others: tuple[tuple[str, int], ...] = ()  # how many layers of each other kind the model has, by name

    def __str__(self) -> str:
        layers = pluralize(self.layers, "layer")
        if self.others:
            layers = f"{self.layers} of {self.decoder_layers} layers have full attention ({self.other_layers} stay)"
        return (
            f"{self.architecture}, {layers}, {pluralize(self.query_heads, 'query head')}, "
            f"{pluralize(self.kv_heads, 'KV head')}, head dim {self.head_dim}"
        )

    @property
    def decoder_layers(self) -> int:
        """All layers of the model's decoder."""
        return self.layers + sum(count for _, count in self.others)

    @property
    def other_layers(self) -> str:
        """The layers of other kinds, in words: "22 sliding_attention"; empty if there are none."""
        return ", ".join(f"{count} {kind}" for kind, count in self.others)

    def get_layer_number(self, row: int) -> int:
        """Return the decoder layer that a row of the tables is of."""
        return self.layer_numbers[row] if self.layer_numbers else row

    def find_row(self, number: int) -> int | None:
        """Return the row of a decoder layer in the tables; None for a layer that has none."""
        if self.layer_numbers:
            return self.layer_numbers.index(number) if number in self.layer_numbers else None
        return number if 0 <= number < self.layers else None

    def as_json(self) -> dict[str, Any]:
        """Return the fields as a file holds them; those of layers of other kinds only where there are such layers."""
        values = dict(vars(self))
        numbers, others = values.pop("layer_numbers"), values.pop("others")
        return values | ({"layer_numbers": list(numbers), "other_layers": dict(others)} if numbers else {})

    def describe_difference(self, profiled: Geometry) -> str | None:
        """Return the first difference from a profile's, worded to follow "the model has"; None if they are equal."""
        name = next((name for name, value in vars(self).items() if value != getattr(profiled, name)), None)
        if name is None:
            return None
        if name == "layer_numbers":
            mine, theirs = (
                f"layers {', '.join(map(str, shape.layer_numbers))}" if shape.layer_numbers else "all"
                for shape in (self, profiled)
            )
            return f"full attention in {mine} where the profile has it in {theirs}"
        if name == "others":
            mine, theirs = (shape.other_layers or "none" for shape in (self, profiled))
            return f"layers of other kinds ({mine}) where the profile has others ({theirs})"
        label = name.replace("_", " ").replace("kv", "KV")
        value = getattr(self, name)
        sizes = f"{value} {label}" if name in ("layers", "query_heads", "kv_heads") else f"{label} {value}"
        return f"{sizes} where the profile has {getattr(profiled, name)}"


def geometry(config: Any) -> Geometry:
    """Return the geometry in a transformers configuration, of its text part if it has several.

    Raises ModelError if the configuration is of no decoder, or no layer has full attention.
    """
    kinds, config = list_layer_kinds(config), get_text_config(config)
    architecture = str(getattr(config, "model_type", type(config).__name__))
    numbers = tuple(number for number, kind in enumerate(kinds) if kind == FULL)
    others = tuple(sorted(Counter(kind for kind in kinds if kind != FULL).items()))
    if not numbers:
        counts = ", ".join(f"{count} of {kind}" for kind, count in others)
        raise ModelError(
            f"the model (type {architecture!r}) has no layer of {FULL}, only {counts}: S2O has nothing to do in it"
        )
    try:
        layer_configs = getattr(config, "per_layer_config", None)  # of a model that says other things of other layers
        config = layer_configs[numbers[0]] if layer_configs else config
        query_heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or query_heads)
        without_rope = getattr(config, "qk_nope_head_dim", None)
        if without_rope is not None:  # of latent attention (MLA), as transformers expands it
            head_dim = int(without_rope) + int(config.qk_rope_head_dim)
        else:
            head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // query_heads)
        listed = numbers if others else ()
        return Geometry(architecture, len(numbers), query_heads, kv_heads, head_dim, listed, others)
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        raise ModelError(
            f"the configuration of type {architecture!r} does not say the heads of its layers ({error}): "
            "the architecture is not supported"
        ) from error


def list_attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the attention modules of the model's layers of full attention. Raises as `number_modules`."""
    return [module for _, module in number_modules(model)]


def number_modules(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """Return the number in the decoder and the attention module of each layer of full attention.

    Raises ModelError if one of these layers has no attention module, or more than one.
    """
    shape = geometry(model.config)
    by_layer = find_decoder_attention(model)
    modules = []
    for number in map(shape.get_layer_number, range(shape.layers)):
        layer_modules = by_layer.get(number, [])
        if len(layer_modules) != 1:
            raise ModelError(
                f"layer {number} of a model of type {shape.architecture!r} has {len(layer_modules)} attention modules "
                "that transformers numbers, expected one: the architecture is not supported"
            )
        modules.append((number, layer_modules[0]))
    return modules


def find_decoder_attention(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Return the attention modules of a model's text part by their own layer numbers.

    They are known by attributes that transformers' attention function and caches need: `layer_idx`, and `is_causal`
    or `num_key_value_groups`.
    """
    config = get_text_config(model.config)
    by_layer: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        number = getattr(module, "layer_idx", None)
        is_attention = hasattr(module, "is_causal") or hasattr(module, "num_key_value_groups")
        if not isinstance(number, int) or not is_attention:
            continue
        own = getattr(module, "config", None)
        # the vision part of a model numbers its layers too
        if own is None or getattr(own, "model_type", None) == getattr(config, "model_type", None):
            by_layer.setdefault(number, []).append(module)
    return by_layer


@torch.no_grad()
def fingerprint(model: Any) -> str:
    """Return what names the function of a model in a profile: `compose_fingerprint` of what it holds.

    Wrappers (torch.compile, PEFT) change nothing, nor do adapters that are disabled, whose LoRA is zeros, or that are
    merged: those are in the weights. Parameters may have any floating point type. Raises RuntimeError for one that is
    not in memory (on the meta device, as offloaded ones are).
    """
    model, adapters = _unwrap(model)
    with _restore_quantised(model):
        weights = {WRAPPERS.sub("", name): tensor for name, tensor in _collect_tensors(model).items()}
        for prefix, module in model.named_modules():
            adapters |= _take_adapters(WRAPPERS.sub("", f"{prefix}."), module, weights)
        is_base: bool = getattr(model, "base_model", None) is model
        if is_base and model.get_output_embeddings() is None:  # as AutoModel loads it
            weights = {f"{model.base_model_prefix}.{name}": tensor for name, tensor in weights.items()}
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith(OTHER_HEADS)}
        return compose_fingerprint(_hash(weights), model.config, _hash(adapters) if adapters else "")


def compose_fingerprint(weights_hash: str, config: Any, adapters_hash: str = "") -> str:
    """Return a fingerprint: hashes of weights, RoPE parameters and active adapters, and the values of config.json.

    weights_hash: as `compute_sampled_fingerprint` gives it; adapters_hash: of the adapters that are active and not
    merged, empty without any.
    """
    weights, separator, base = weights_hash.partition(BASE)
    rope = _read_rope_parameters(config)
    if rope:
        weights += ROPE + hashlib.sha256(dump_json(rope).encode()).hexdigest()[:16]
    if adapters_hash:
        weights += ADAPTERS + adapters_hash[:16]
    return f"{weights}{separator}{base}{CONFIG}{dump_json(select_config_values(config))}"


def select_config_values(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration's text part that may decide what its weights compute, as JSON."""

    def parse_number(text: str) -> float:
        value = float(f"{float(text):.7g}")  # GGUF files have float32
        return int(value) if value.is_integer() and abs(value) < 1 << 53 else value

    values = vars(get_text_config(config))
    by_positions = BY_POSITIONS.search(str(values.get("rope_parameters"))) is not None
    limits = () if by_positions else ("max_position_embeddings", "original_max_position_embeddings")
    values = {name: values[name] for name in values if not WITHOUT_EFFECT.fullmatch(name) and name not in limits}
    text = json.dumps(values, default=lambda other: type(other).__name__)
    decided: dict[str, Any] = json.loads(text, parse_int=parse_number, parse_float=parse_number, parse_constant=str)
    return decided


def dump_json(values: Any) -> str:
    """Return values as JSON that is written one way, as hashes need it."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def split_fingerprint(fingerprint: str) -> dict[str, Any]:
    """Return a fingerprint as a file's fields: `fingerprint` is what versions before know of it."""
    hashes, _, config = fingerprint.partition(CONFIG)
    hashes, _, base = hashes.partition(BASE)
    more = {"base_fingerprint": base} if base else {}
    return {"fingerprint": hashes, **more} | ({"config": json.loads(config)} if config else {})


def join_fingerprint(hashes: str, base: str | None, config: Mapping[str, Any] | None) -> str:
    """Return the fingerprint that `split_fingerprint` took apart."""
    hashes = re.split(r"\+(?:base|config)-", hashes)[0]  # a foreign file's may hold anything
    return f"{hashes}{BASE + base if base else ''}{'' if config is None else CONFIG + dump_json(config)}"


def find_not_finite(model: nn.Module) -> str | None:
    """Return the first parameter that holds NaN or inf, in words; None if no plain one in memory does. All are read."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta or type(parameter.data) is not Tensor or not parameter.is_floating_point():
            continue  # not in memory, in a quantised type, or split over processes
        values = parameter.detach() if parameter.element_size() > 1 else parameter.detach().float()
        if not bool(values.isfinite().all()):
            number = "NaN" if bool(values.isnan().any()) else "inf"
            return f"{name} holds {number}: check that the model's weights are whole and meant for {parameter.dtype}"
    return None


def explain_mismatch(model_fingerprint: str, profile_fingerprint: str) -> str | None:
    """Return how a model differs from the one a profile was calibrated on, in words; None if it is the same.

    Of config.json those fields are compared that both have: versions of transformers add some. A model without a
    language model's head is compared with the profile's model without its head.
    """
    model, profile = split_fingerprint(model_fingerprint), split_fingerprint(profile_fingerprint)
    weights, *parts = re.split(r"(?=\+)", model["fingerprint"])
    calibrated, *calibrated_parts = re.split(r"(?=\+)", profile["fingerprint"])
    if weights not in (calibrated, profile.get("base_fingerprint")):
        return "the weights are not those"
    if different := {*parts} ^ {*calibrated_parts}:
        rope = "RoPE parameters (rope_parameters in the model's config)"
        return f"the {rope if any(part.startswith(ROPE) for part in different) else 'active adapters'} are not those"
    return explain_config_mismatch(model.get("config", {}), profile.get("config", {}))


def explain_config_mismatch(model: Mapping[str, Any], profile: Mapping[str, Any]) -> str | None:
    """Return the first field of config.json whose values differ, in words; None if none that both have does."""
    for name in sorted(model.keys() & profile.keys()):
        if model[name] != profile[name]:
            mine, calibrated = (json.dumps(values[name])[:SHOWN] for values in (model, profile))
            return f"the config ({name} is {mine} where the profile has {calibrated}) is not the one"
    return None


def get_device_of(module: nn.Module) -> torch.device:
    """Return the device of a part of a model: the layers of one model may be on several GPUs."""
    return next(chain(module.parameters(), module.buffers())).device  # the weights of GPTQ and AWQ are buffers


def find_offloaded(model: nn.Module) -> str | None:
    """Return the reason that a model with tensors outside of memory cannot be compared; None if all are in it."""
    missing = next((name for name, tensor in _collect_tensors(model).items() if tensor.is_meta), None)
    return None if missing is None else f"the weights are offloaded ({missing} is not in memory) and cannot be compared"


def _read_rope_parameters(config: Any) -> dict[str, Any]:
    """Return the RoPE parameters of a configuration's text part, as every version of transformers would write them."""

    def normalise(value: Any) -> Any:
        if isinstance(value, dict):
            pairs = {name: normalise(part) for name, part in value.items() if part is not None}
            if "type" in pairs:  # the former name of `rope_type`, which SGLang writes beside it
                pairs.setdefault("rope_type", pairs.pop("type"))
            if any(isinstance(part, dict) for part in pairs.values()):  # transformers 5.0 adds a type to them
                pairs.pop("rope_type", None)
            return {name: part for name, part in pairs.items() if (name, part) != ("partial_rotary_factor", 1.0)}
        if isinstance(value, (list, tuple)):
            return [normalise(part) for part in value]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if is_number else value if isinstance(value, bool) else str(value)

    parameters: dict[str, Any] = normalise(dict(getattr(get_text_config(config), "rope_parameters", None) or {}))
    return parameters


def _hash(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash over evenly spaced samples of what a checkpoint holds, in bfloat16: the same in every type."""

    def sample(name: str, indices: range) -> Tensor:
        gather = getattr(tensors[name], "full_tensor", None)  # split over processes: all of them put it together
        tensor: Tensor = tensors[name] if gather is None else gather()
        try:
            flat = tensor.reshape(-1)
        except NotImplementedError:  # of a quantised type that has no other shapes (torchao)
            flat = tensor.dequantize().reshape(-1)
        return flat[indices.start : indices.stop : indices.step]

    return compute_sampled_fingerprint({name: tensor.shape for name, tensor in tensors.items()}, sample)


def _unwrap(model: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return the model inside wrappers of torch.compile and PEFT, and the prompts that PEFT learnt for it."""
    prompts: dict[str, Tensor] = {}
    while True:
        if (inner := model._modules.get("_orig_mod")) is not None:
            model = inner
        elif hasattr(type(model), "get_base_model"):
            if model.active_peft_config.is_prompt_learning:
                prompts |= model.prompt_encoder[model.active_adapter].named_parameters(prefix="prompt")
            model = model.get_base_model()
        else:
            return model, prompts


def _take_adapters(prefix: str, module: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take a module's PEFT adapters, whose names begin with `prefix`, out of the weights.

    Return the tensors of those that have an effect, by names that do not depend on the adapters' own, and the scaling
    of each in the name of an empty one.
    """
    by_adapter: dict[str, dict[str, Tensor]] = {}
    for kind in getattr(module, "adapter_layer_names", ()):
        for name, tensor in module._modules.get(kind, nn.Module()).named_parameters():  # type: ignore[union-attr]
            weights.pop(f"{prefix}{kind}.{name}", None)
            adapter, _, rest = name.partition(".")
            by_adapter.setdefault(adapter, {})[f"{kind}.{rest}"] = tensor
    layer: Any = module
    if not by_adapter or layer.disable_adapters or layer.merged_adapters:
        return {}
    active = [adapter for adapter in layer.active_adapters if _has_effect(by_adapter.get(adapter, {}))]
    tensors: dict[str, Tensor] = {}
    for index, adapter in enumerate(active):
        tensors |= {f"{prefix}{index}.{name}": tensor for name, tensor in by_adapter[adapter].items()}
        scaling = getattr(layer, "scaling", {}).get(adapter)
        tensors[f"{prefix}{index}.scaling={scaling}"] = torch.empty(0)
    return tensors


def _has_effect(tensors: Mapping[str, Tensor]) -> bool:
    """Return False for no tensors, and for a LoRA whose product is zero, as a new one's is."""
    nonzero = {name for name, tensor in tensors.items() if bool(tensor.any())}
    factors = {name for name in tensors if re.match(r"lora_(A|B|E|embedding_.)\.(?!bias)", name)}
    return bool(tensors) and (factors <= nonzero or bool(nonzero - factors))  # one zero factor makes the product zero


def _collect_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what a checkpoint of a model holds and nothing that runs changes: its parameters and buffers, by name.

    Quantised weights are in buffers. On a CPU the first forward pass packs those of GPTQ and AWQ anew and leaves their
    scales, which then name the weights alone.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        names = module._buffers.keys() - module._non_persistent_buffers_set
        if PACKED | {SCALES} <= names:
            scales = module._buffers[SCALES]
            names -= PACKED if scales is not None and scales.device.type == "cpu" else set()
        tensors |= {f"{prefix}.{name}": tensor for name in names if (tensor := module._buffers[name]) is not None}
    return tensors


@contextmanager
def _restore_quantised(model: nn.Module) -> Iterator[None]:
    """Put quantised weights, inside a block, into the state that they had before the first forward pass.

    compressed-tensors decompresses a model then, by a hook, which is called here if it has not been. On a CPU
    bitsandbytes packs 4-bit weights then; saving unpacks them. They are put back as they were, because bitsandbytes
    unpacks their scales wrongly (0.50.2): what runs after that computes something else.
    """
    for module in model.modules():
        hook = module._forward_pre_hooks.get(getattr(module.__dict__.get("ct_decompress_hook"), "id", -1))
        if hook is not None:
            hook(module, ())
    packed = []
    try:
        for module in model.modules():
            weight: Any = getattr(module, "weight", None)
            state = getattr(weight, "quant_state", None)
            if getattr(state, "packing_format_for_cpu", False):
                packed.append((weight, weight.data, state))
                weight.quant_state = copy.copy(state)
                module.state_dict()
        yield
    finally:
        for weight, data, state in packed:
            weight.data, weight.quant_state = data, state


def compute_sampled_fingerprint(shapes: Mapping[str, Sequence[int]], sample: Callable[[str, range], Tensor]) -> str:
    """Return the hash of parameters that need not be in memory; after it that of all but a head, if there is one.

    sample: returns the values of a parameter, given its name, at indices into it when it is flat.
    """
    samples = {}
    for name, shape in shapes.items():
        if numel := math.prod(shape):
            indices = range(0, numel, max(1, numel // SAMPLES_PER_TENSOR))[:SAMPLES_PER_TENSOR]
            samples[name] = sample(name, indices).bfloat16().cpu()

    def compute_hash(names: Sequence[str]) -> str:
        digest = hashlib.sha256("".join(f"{name}{tuple(shapes[name])}" for name in names).encode())
        digest.update(read_tensor_bytes(torch.cat([samples[name] for name in names if name in samples])))
        return digest.hexdigest()

    names = sorted(shapes)
    base = [name for name in names if not name.startswith(HEADS)]
    weights_hash = compute_hash(names)
    return weights_hash if len(base) in (0, len(names)) else f"{weights_hash}{BASE}{compute_hash(base)}"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, of which only requested elements are read."""

    path: Path
    start: int  # the byte in the file where the tensor begins
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]

    def read_elements(self, indices: range) -> Tensor:
        """Return elements of the flattened tensor; a mapped file would read many pages around each of them.

        Raises OSError, and ValueError if torch has no such type, or the file ends before an element.
        """
        dtype = getattr(torch, STORED_TYPES.get(self.dtype, ""), None)
        if dtype is None:
            raise ValueError(f"torch has no type {self.dtype}")
        size = dtype.itemsize
        with self.path.open("rb") as file:
            data = b"".join(os.pread(file.fileno(), size, self.start + size * index) for index in indices)
        return torch.frombuffer(bytearray(data), dtype=dtype, count=len(indices))


def read_stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name, none of them read. Raises SafetensorError and OSError."""
    with safe_open(path, "pt"):  # refuses a file that is damaged or cut off
        pass
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(path, 8 + size + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
    }


def read_tensor_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a CPU tensor of any shape and dtype, in this machine's order."""
    tensor = tensor.detach().contiguous()  # torch hands bytes to numpy only, which the runtime does without
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
