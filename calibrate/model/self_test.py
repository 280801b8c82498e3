"""Test that S2O can serve a model: its layers of full attention, with S2O that never stops, against eager attention.

An architecture is supported if this holds. Every attention module computes both on the same queries, keys and values,
and passes eager attention's output on, so that rounding in one layer changes nothing in the next. Masks, positions
and whatever else a layer passes to its attention function must mean to S2O what they mean to the model's own code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
    get_decoder,
    list_decoder_layers,
    list_other_parts,
    replace_forwards,
    with_attention,
)
from calibrate.model.models import LoadedModel
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.devices import identify
from s2o_runtime.errors import ModelError
from s2o_runtime.huggingface import hf
from s2o_runtime.huggingface.layers import STATE, TransformersCall
from s2o_runtime.identity import Geometry, find_not_finite
from s2o_runtime.layer_kinds import get_max_positions, get_text_config
from s2o_runtime.serving.attend import measure_difference
from s2o_runtime.tiles import DECODE, list_candidate_tiles

NAME = "s2o_self_test"
SEGMENTS = 3  # of a prompt, the last one not whole
CPU_TILE = TileConfig(64, 32, 1, 4, 1)
ALLOWED = {torch.float32: 1e-7, torch.float64: 1e-7}  # mean squared difference over mean square
ALLOWED_ROUNDED = 1e-3  # the same where weights of the softmax are rounded to 16 bits; a wrong mask gives 0.1 and more


@torch.no_grad()
def run_self_test(loaded: LoadedModel) -> None:
    """Check that S2O can serve every layer of full attention: a prompt whole, in a padded batch, and in two chunks.

    Of a model whose weights are not all on the device, the layers up to the first one of full attention are checked;
    those behind it are of the same classes. Raises ModelError with the first layer that it cannot serve and the reason.
    """
    device = loaded.weights.device
    layers = list_decoder_layers(loaded.model)
    if not loaded.weights.resident:
        first = next(index for index, layer in enumerate(layers) if layer.row is not None)
        layers = layers[: first + 1]
    config = choose_test_config(loaded.geometry, device)
    if config is None:  # no kernel for this head dim here: the search says so
        return
    length = min(SEGMENTS * config.segment - 20, get_max_positions(loaded.model.config))
    decoder = get_decoder(loaded.model)
    cache = "cache" if "cache" in signature(decoder.forward).parameters else "past_key_values"  # until 5.23
    comparison = _Comparison(loaded.geometry, loaded.model)
    AttentionInterface.register(NAME, comparison.attention)
    AttentionMaskInterface.register(NAME, comparison.mask)
    with with_attention(loaded.model, NAME), _prepare(loaded, layers, config, comparison):
        for case, calls in _make_cases(loaded.model, length, device).items():
            comparison.start(case)
            memory = None
            for call in calls:
                padding = call.get("attention_mask")
                comparison.real = None if padding is None else padding.bool()
                memory = getattr(decoder(**{cache: memory}, **call), cache)
            for layer in layers:
                missing = "it does not call transformers' attention function"
                reason = comparison.reasons.get(layer.attention, missing) if layer.attention is not None else ""
                if reason:  # empty where S2O ran
                    raise ModelError(
                        f"layer {layer.number} cannot run S2O ({reason}, {case} prompt): the model is not supported"
                    )


def choose_test_config(geometry: Geometry, device: torch.device) -> LayerConfig | None:
    """Return a configuration with which S2O is dense attention; None if no kernel here takes the model's heads."""
    on_gpu = device.type == "cuda"
    tiles = list_candidate_tiles(geometry.head_dim, identify(device).capability) if on_gpu else (CPU_TILE,)
    if not tiles:
        return None
    tile = replace(tiles[0], min_queries=DECODE)  # or the second chunk would go dense on a GPU
    return LayerConfig.uniform(geometry.query_heads, segment=max(64, tile.rows), tile=tile).as_exact()


def _make_cases(model: Any, length: int, device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """Make the calls of the decoder for each case."""
    vocabulary = get_text_config(model.config).vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(8, vocabulary - 1), vocabulary, (2, length), generator=generator).to(device)
    padding = torch.ones_like(ids)
    padding[1, : length // 3] = 0
    cut = length // 2 + 5
    chunks = (ids[:1, :cut], ids[:1, cut:])
    return {
        "whole": [{"input_ids": ids[:1], "use_cache": False}],
        "padded": [{"input_ids": ids, "attention_mask": padding, "use_cache": False}],
        "chunked": [{"input_ids": chunk, "use_cache": True} for chunk in chunks],
    }


@contextmanager
def _prepare(
    loaded: LoadedModel, layers: list[DecoderLayer], config: LayerConfig, comparison: _Comparison
) -> Iterator[None]:
    """Let the decoder run these layers alone inside the block, with S2O beside their attention.

    Their parameters are on the device. A layer whose output is not finite is an error that names it, not the next one.
    """

    def check(number: int, module: nn.Module, arguments: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        comparison.check_finite(number, "output", comparison.without_padding(hidden))

    modules = [layer.module for layer in layers]
    others = [layer.module for layer in list_decoder_layers(loaded.model) if layer.module not in modules]
    served = [(layer.attention, layer.number) for layer in layers if layer.attention is not None]
    handles = [layer.module.register_forward_hook(partial(check, layer.number)) for layer in layers]
    for attention, number in served:
        hf.attach(attention, hf.LayerState(number, lambda keys: config, min_length=0, meter=None))
    try:
        with (
            loaded.weights.put_on_device(*list_other_parts(loaded.model), *modules),
            replace_forwards(dict.fromkeys(others, lambda hidden_states, *arguments, **named: hidden_states)),
        ):
            yield
    finally:
        for attention, _ in served:
            hf.detach(attention)
        for handle in handles:
            handle.remove()


class _Comparison:
    """The attention function and the mask function of the test, and what they saw in the current case.

    real: the positions that are no padding, bool [B, L]; None if all are. reasons: why attention modules did not run
    S2O, empty for those that did. masks: eager attention's masks, and beside each S2O's.
    """

    def __init__(self, geometry: Geometry, model: Any) -> None:
        self.geometry, self.model = geometry, model
        self.real: Tensor | None = None
        self.start("")

    def start(self, case: str) -> None:
        """Forget what was seen in the last case."""
        self.case = case
        self.reasons: dict[nn.Module, str] = {}
        self.masks: list[tuple[Tensor, Tensor | None]] = []

    def mask(self, **call: Any) -> Tensor | None:
        """Make eager attention's mask, beside which S2O's is remembered."""
        mask: Tensor | None = eager_mask(**call)
        if mask is not None:
            self.masks.append((mask, hf.s2o_mask(**call)))
        return mask

    def find_s2o_mask(self, mask: Tensor | None) -> Tensor | None:
        """Return S2O's mask in place of one that reached a layer.

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

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
    ) -> tuple[Tensor, None]:
        """Compute eager attention in float32, compared with S2O where the module is one of full attention."""

        # in 16 bits eager attention rounds its scores, which changes weights by percents where scores are large
        def cast_up(tensor: Tensor | None) -> Tensor | None:
            return tensor.float() if tensor is not None and tensor.dtype in (torch.float16, torch.bfloat16) else tensor

        own: Callable[..., tuple[Tensor, Any]] = getattr(  # torch's SDPA where the model's file has no eager attention
            sys.modules[type(module).__module__], "eager_attention_forward", sdpa_attention_forward
        )
        named.setdefault("scaling", None)
        exact = own(module, *map(cast_up, (query, key, value, attention_mask)), **named)[0]
        state: hf.LayerState | None = module.__dict__.get(STATE)
        if state is not None:
            TransformersCall(module, query, key, value, attention_mask, named).check_supported()
            expected = self.geometry.query_heads, self.geometry.kv_heads, self.geometry.head_dim
            sizes = query.shape[1], key.shape[1], query.shape[3]
            if sizes != expected:
                heads = "%d query heads, %d KV heads and a head dim of %d"
                message = f"layer %d has {heads}, its configuration says {heads}: the model is not supported"
                raise ModelError(message % (state.layer, *sizes, *expected))
            state.counts.clear()
            mask = self.find_s2o_mask(attention_mask)
            ours = hf.s2o_attention_forward(module, query, key, value, mask, **named)[0]
            ((path, reason),) = state.counts
            if path == "s2o":
                self.reasons[module] = ""
            else:
                self.reasons.setdefault(module, reason)
            self._compare(state.layer, ours, exact)
        return exact.to(query.dtype), None

    def without_padding(self, tensor: Tensor) -> Tensor:
        """Return a tensor [B, L, ...] without its positions that are padding."""
        return tensor if self.real is None else tensor[self.real.to(tensor.device)]

    def check_finite(self, number: int, what: str, tensor: Tensor) -> None:
        """Raise ModelError if something that a layer computed holds NaN or inf; weights that do are named first."""
        if not bool(tensor.isfinite().all()):
            raise ModelError(
                find_not_finite(self.model)
                or f"layer {number}'s {what} holds NaN or inf ({self.case} prompt), none of its weights does: check "
                f"that the model is meant for {tensor.dtype}"
            )

    def _compare(self, number: int, ours: Tensor, out: Tensor) -> None:
        """Raise ModelError if two outputs [B, L, Hq, D] of a layer differ by more than the rounding of `ours`."""
        ours, out = self.without_padding(ours), self.without_padding(out)
        self.check_finite(number, "attention", out)
        difference = float(measure_difference(ours, out))
        if not difference <= ALLOWED.get(ours.dtype, ALLOWED_ROUNDED):
            raise ModelError(
                f"layer {number} is not plain causal attention ({self.case} prompt: its output differs from eager "
                f"attention's by {difference:.1e} of its mean square): the model is not supported"
            )
