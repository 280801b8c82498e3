"""Whether S2O can serve a model: its layers of full attention, with S2O that never stops, against eager attention.

An architecture is supported if this holds. Every attention module computes both on the same queries, keys and values,
and passes eager attention's output on, so that rounding in one layer changes nothing in the next. Masks, positions
and whatever else a layer passes to its attention function must mean to S2O what they mean to the model's own code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from calibrate.model.layers import (
    DecoderLayer,
    attention_implementation,
    beside_layers,
    decoder_layers,
    decoder_of,
    replaced_forwards,
)
from calibrate.model.models import LoadedModel
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.devices import identify
from s2o_runtime.errors import ModelError
from s2o_runtime.huggingface import hf
from s2o_runtime.huggingface.layers import STATE, layer_obstacle
from s2o_runtime.identity import Geometry, not_finite
from s2o_runtime.layer_kinds import positions, text_config
from s2o_runtime.tiles import DECODE, candidate_tiles

NAME = "s2o_self_test"
SEGMENTS = 3  # of a prompt, the last one not whole
CPU_TILE = TileConfig(64, 32, 1, 4, 1)
ALLOWED = {torch.float32: 1e-7, torch.float64: 1e-7}  # mean squared difference over mean square
ALLOWED_ROUNDED = 1e-3  # the same where weights of the softmax are rounded to 16 bits; a wrong mask gives 0.1 and more


@torch.no_grad()
def self_test(loaded: LoadedModel) -> None:
    """Check that S2O can serve every layer of full attention: a prompt whole, in a padded batch, and in two chunks.

    Of a model whose weights are not all on the device, the layers up to the first one of full attention are checked;
    those behind it are of the same classes.

    Args:
        loaded: the model.

    Raises:
        ModelError: It cannot, with the first layer and the reason.
    """
    device = loaded.weights.device
    layers = decoder_layers(loaded.model)
    if not loaded.weights.resident:
        first = next(index for index, layer in enumerate(layers) if layer.row is not None)
        layers = layers[: first + 1]
    config = never_stops(loaded.geometry, device)
    if config is None:  # no kernel for this head dim here: the search says so
        return
    length = min(SEGMENTS * config.segment - 20, positions(loaded.model.config))
    decoder = decoder_of(loaded.model)
    cache = "cache" if "cache" in signature(decoder.forward).parameters else "past_key_values"  # until 5.23
    comparison = _Comparison(loaded.geometry, loaded.model)
    AttentionInterface.register(NAME, comparison.attention)
    AttentionMaskInterface.register(NAME, comparison.mask)
    with (
        attention_implementation(loaded.model, NAME),
        _only(loaded, layers),
        _attached(layers, config),
        _checked(layers, comparison),
    ):
        for case, calls in _cases(loaded.model, length, device).items():
            comparison.begin(case)
            memory = None
            for call, real in calls:
                comparison.real = real
                memory = getattr(decoder(**{cache: memory}, **call), cache)
            for layer in layers:
                if layer.attention is not None and layer.attention not in comparison.ran:
                    reason = comparison.reason(layer.attention)
                    raise ModelError(f"layer {layer.number} cannot run S2O ({reason}): the model is not supported")


def never_stops(geometry: Geometry, device: torch.device) -> LayerConfig | None:
    """A configuration with which S2O is dense attention; None if this GPU has no kernel for the model's heads."""
    tile: TileConfig | None = CPU_TILE
    if device.type == "cuda":
        tile = next(iter(candidate_tiles(geometry.head_dim, identify(device).capability)), None)
    if tile is None:
        return None
    tile = replace(tile, min_queries=DECODE)  # or the second chunk would go dense on a GPU
    return LayerConfig.uniform(geometry.query_heads, tau=0.0, segment=max(64, tile.rows), tile=tile)


def _cases(
    model: Any, length: int, device: torch.device
) -> dict[str, list[tuple[dict[str, Any], Tensor | None]]]:  # fmt: skip
    """The calls of the decoder for each case, with which positions are no padding: bool [B, L], None if all are not."""
    config = text_config(model.config)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(8, config.vocab_size - 1), config.vocab_size, (2, length), generator=generator).to(device)
    padding = torch.ones_like(ids)
    padding[1, : length // 3] = 0
    cut = length // 2 + 5
    chunks = (ids[:1, :cut], ids[:1, cut:])
    return {
        "whole": [({"input_ids": ids[:1], "use_cache": False}, None)],
        "padded": [({"input_ids": ids, "attention_mask": padding, "use_cache": False}, padding.bool())],
        "chunked": [({"input_ids": chunk, "use_cache": True}, None) for chunk in chunks],
    }


@contextmanager
def _only(loaded: LoadedModel, layers: list[DecoderLayer]) -> Iterator[None]:
    """Inside the block the decoder runs these layers alone, their parameters on the device."""
    chosen = [layer.module for layer in layers]
    others = [layer.module for layer in decoder_layers(loaded.model) if layer.module not in chosen]
    with (
        loaded.weights.on_device(*beside_layers(loaded.model), *chosen),
        replaced_forwards(dict.fromkeys(others, _unchanged)),
    ):
        yield


def _unchanged(hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
    return hidden_states


@contextmanager
def _attached(layers: list[DecoderLayer], config: LayerConfig) -> Iterator[None]:
    """Inside the block the attention modules of these layers would run S2O with this configuration."""
    modules = [(layer.attention, layer.number) for layer in layers if layer.attention is not None]
    for module, number in modules:
        hf.attach(module, hf.LayerState(number, lambda keys: config, min_length=0, meter=None))
    try:
        yield
    finally:
        for module, _ in modules:
            hf.detach(module)


@contextmanager
def _checked(layers: list[DecoderLayer], comparison: _Comparison) -> Iterator[None]:
    """Inside the block a layer whose output is not finite is an error that names it, not the next layer."""

    def check(number: int, module: nn.Module, arguments: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        comparison.check_finite(number, "output", comparison.without_padding(hidden))

    handles = [layer.module.register_forward_hook(partial(check, layer.number)) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Comparison:
    """The attention function and the mask function of the test, and what they saw.

    geometry: what the configuration says of the layers. model: its weights are looked at where numbers are not finite.
    case: what is tested. real: which positions are no padding,
    bool [B, L]; None if all are none. ran: the modules that ran S2O in this case. reasons: why others did not. masks:
    Eager attention's masks of this case, and beside each what S2O gets instead.
    """

    geometry: Geometry
    model: Any
    case: str = ""
    real: Tensor | None = None
    ran: set[nn.Module] = field(default_factory=set)
    reasons: dict[nn.Module, str] = field(default_factory=dict)
    masks: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)

    def begin(self, case: str) -> None:
        self.case = case
        self.ran.clear()
        self.reasons.clear()
        self.masks.clear()

    def mask(self, **call: Any) -> Tensor | None:
        """Eager attention's mask, beside which S2O's is remembered."""
        mask: Tensor | None = eager_mask(**call)
        if mask is not None:
            self.masks.append((mask, hf.s2o_mask(**call)))
        return mask

    def s2o_mask(self, mask: Tensor | None) -> Tensor | None:
        """What S2O gets instead of a mask that reached a layer.

        A model that is spread over GPUs hands its layers copies of the mask, and of S2O's if that is what it made: then
        this is a copy too, on the same device, which has lost what S2O attached to its mask.
        """
        if mask is None:
            return None
        for eager, ours in self.masks:
            if eager is mask:
                return ours
        for eager, ours in self.masks:
            if ours is not None and eager.dtype == mask.dtype and torch.equal(eager.to(mask.device), mask):
                return ours.to(mask.device, copy=True)
        return None

    def reason(self, module: nn.Module) -> str:
        return self.reasons.get(module, f"it does not call transformers' attention function, {self.case} prompt")

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **named: Any,
    ) -> tuple[Tensor, None]:
        """Eager attention in float32, compared with S2O where the module is one of full attention.

        In the model's own type eager attention rounds its scores, which changes weights by percents where scores are
        large.
        """
        arguments = {"scaling": scaling, **named}
        exact = _own_attention(module)(module, *map(_raised, (query, key, value, attention_mask)), **arguments)[0]
        out = exact.to(query.dtype)
        state: hf.LayerState | None = module.__dict__.get(STATE)
        if state is None:
            return out, None
        number = state.layer
        if (obstacle := layer_obstacle(query, key, value, named)) is not None:
            raise ModelError(f"layer {number} cannot run S2O ({obstacle}): the model is not supported")
        self._check_sizes(number, query, key)
        state.counts.clear()
        mask = self.s2o_mask(attention_mask)
        ours = hf.s2o_attention_forward(module, query, key, value, mask, **arguments)[0]
        ((path, reason),) = state.counts
        if path == "s2o":
            self.ran.add(module)
        else:
            self.reasons.setdefault(module, f"{reason}, {self.case} prompt")
        self._compare(number, ours, exact)
        return out, None

    def _check_sizes(self, number: int, query: Tensor, key: Tensor) -> None:
        """Raises ModelError if a layer has other sizes than the configuration says."""
        expected = self.geometry.query_heads, self.geometry.kv_heads, self.geometry.head_dim
        sizes = query.shape[1], key.shape[1], query.shape[3]
        if sizes != expected:
            heads = "{} query heads, {} KV heads and a head dim of {}"
            raise ModelError(
                f"layer {number} has {heads.format(*sizes)}, its configuration says {heads.format(*expected)}: the "
                "model is not supported"
            )

    def without_padding(self, tensor: Tensor) -> Tensor:
        """A tensor [B, L, ...] without its positions that are padding."""
        return tensor if self.real is None else tensor[self.real.to(tensor.device)]

    def check_finite(self, number: int, what: str, tensor: Tensor) -> None:
        """Raises ModelError if something that a layer computed holds NaN or inf; weights that do are named first."""
        if not bool(tensor.isfinite().all()):
            raise ModelError(
                not_finite(self.model)
                or f"layer {number}'s {what} holds NaN or inf ({self.case} prompt), none of its weights does: check "
                f"that the model is meant for {tensor.dtype}"
            )

    def _compare(self, number: int, ours: Tensor, out: Tensor) -> None:
        """Raises ModelError if two outputs [B, L, Hq, D] of a layer are not the same but for the rounding of `ours`."""
        ours, out = self.without_padding(ours), self.without_padding(out)
        self.check_finite(number, "attention", out)
        difference = (ours.double() - out.double()).square().mean() / out.double().square().mean().clamp_min(1e-30)
        if not float(difference) <= ALLOWED.get(ours.dtype, ALLOWED_ROUNDED):
            raise ModelError(
                f"layer {number} is not plain causal attention ({self.case} prompt: its output differs from eager "
                f"attention's by {float(difference):.1e} of its mean square): the model is not supported"
            )


def _raised(tensor: Tensor | None) -> Tensor | None:
    """A tensor of 16-bit floating point numbers in float32; others as they are."""
    return tensor.float() if tensor is not None and tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _own_attention(module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    """The eager attention of the module's own model; torch's SDPA where its file has none."""
    file = sys.modules[type(module).__module__]
    own: Callable[..., tuple[Tensor, Any]] = getattr(file, "eager_attention_forward", sdpa_attention_forward)
    return own
