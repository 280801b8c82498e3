"""What certify prompts say of a model, prompt by prompt: errors of sampled rows, continued calls, predictions.

The prompts of one length move through the patched and the dense model together, one layer at a time, as in `verify`.
Exact attention is computed for sampled rows only, so that many prompts cost little more than their two prefills.
"""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from calibrate.curves.row_errors import WORST
from calibrate.model.logits import logits_on_device
from calibrate.model.memory import within_memory
from calibrate.model.models import LoadedModel
from calibrate.model.streams import Stream, attention_implementation, begin, decoder_layers, layer_on_device
from calibrate.prompts.prompts import Prompt
from calibrate.proof.agreement import PromptAgreement, compare
from calibrate.proof.chunks import Chunks, chunks_of
from calibrate.proof.rows import LAST, ROWS, RowSample, evenly_drawn, sampled_rows
from calibrate.proof.verify import Configured, PatchableLayer
from calibrate.recipe import Budget
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import LayerConfig
from s2o_runtime.huggingface import hf
from s2o_runtime.reference.dense import sdpa_backend
from s2o_runtime.scoring import Scoring

CONTINUED = (64, 512)  # new tokens behind a cached prefix
NOISE_PROMPTS = 2  # prompts that the noise floor is measured on

C = TypeVar("C", bound=Configured)


@dataclass(frozen=True)
class PromptError:
    """What one layer is off by on one prompt.

    mse, power: Mean squared error and mean square of the dense output, over all rows. last: The same over the last
    eighth of the rows. continued: The same of calls that bring only so many new tokens, by their number; numbers of
    which the prompt does not have twice as many tokens are missing. worst: The `WORST` quantile of the relative
    errors of the sampled rows of all heads.
    """

    mse: float
    power: float
    last: tuple[float, float]
    continued: Mapping[int, tuple[float, float]]
    worst: float


@dataclass(frozen=True)
class LayerSample:
    """One layer: each prompt's errors, and the mean density over heads and prompts."""

    prompts: tuple[PromptError, ...]
    density: float

    def errors(self, budget: Budget) -> list[float]:
        """Each prompt's error in the budget's unit."""
        return [budget.error(prompt.mse, prompt.power) for prompt in self.prompts]

    def last_errors(self, budget: Budget) -> list[float]:
        """Each prompt's error over the last eighth of its rows."""
        return [budget.error(*prompt.last) for prompt in self.prompts]

    def continued_errors(self, budget: Budget) -> dict[int, list[float]]:
        """Each prompt's error of continued calls, by the number of new tokens."""
        return {
            new_tokens: [budget.error(*prompt.continued[new_tokens]) for prompt in self.prompts]
            for new_tokens in (self.prompts[0].continued if self.prompts else ())
        }


@dataclass(frozen=True)
class LengthSample:
    """One length: its prompts, every layer, and what the model predicts for each prompt.

    noise_floor: The mean KL between two dense implementations, in nats; None where there is one only.
    """

    prompts: tuple[Prompt, ...]
    layers: tuple[LayerSample, ...]
    agreements: tuple[PromptAgreement, ...]
    noise_floor: float | None


def accept(configured: Configured, length: int, layer: int, sample: LayerSample) -> None:
    """Accept what was sampled, whatever came out."""


@torch.no_grad()
def sample(
    loaded: LoadedModel,
    length: int,
    prompts: Sequence[Prompt],
    configured: C,
    revise: Callable[[C, int, int, LayerSample], C | None] = accept,
    on_step: Callable[[], object] = lambda: None,
    chunk: int | None = None,
) -> tuple[C, LengthSample]:
    """Measure a configuration on prompts of one length.

    Args:
        loaded: The model.
        length: Tokens of every prompt.
        prompts: At least one.
        configured: What each layer runs.
        revise: Given what was measured, the length, the layer's index and its sample: what to measure instead on the
            same inputs, or None to accept this one. The layers that follow see what the accepted one gave.
        on_step: Called after each layer.
        chunk: Tokens that a layer is fed at once, as a server does; None for whole prompts.

    Returns:
        What was accepted in the end, and what was measured of it.

    Raises:
        ModelError: inf or NaN came up.
        ResourceError: The GPU's memory ran out.
    """
    hf.register()
    layers = []
    device, held = loaded.weights.device, loaded.weights.held
    with attention_implementation(loaded.model, hf.NAME):
        patched = dense = begin(loaded, [prompt.ids for prompt in prompts])
        noise = _NoiseFloor.of(loaded, dense[:NOISE_PROMPTS])
        for of_decoder in decoder_layers(loaded.model):
            index, number = of_decoder.row, of_decoder.number
            with (
                layer_on_device(loaded, of_decoder) as module,
                within_memory(device, length, held, f"certifying layer {number}"),
            ):
                if index is None or of_decoder.attention is None:
                    alike = patched is dense  # before the first layer that S2O may change
                    patched = [stream.through(module, number) for stream in patched]
                    dense = patched if alike else [stream.through(module, number) for stream in dense]
                    if noise is not None:
                        noise.pass_through(module, number)
                    continue
                layer = PatchableLayer(index, number, module, of_decoder.attention, device)
                revised: C | None = configured
                while revised is not None:
                    configured = revised
                    config, chunks = configured.layer_config(index, length), chunks_of(configured, chunk, index, length)
                    after, measured = _measured(layer, patched, config, chunks)
                    revised = revise(configured, length, index, measured)
                patched = after
                dense = [layer.dense(stream) for stream in dense]
                if noise is not None:
                    noise.advance(layer)
            layers.append(measured)
            on_step()
        with logits_on_device(loaded) as logits:
            agreements = tuple(
                compare(prompt, one.hidden, other.hidden, logits)
                for prompt, one, other in zip(prompts, dense, patched, strict=True)
            )
            floor = None if noise is None else noise.kl(prompts, dense, logits)
    return configured, LengthSample(tuple(prompts), tuple(layers), agreements, floor)


@dataclass
class _Observed:
    """The errors of one layer's prompts, in the order in which they come."""

    config: LayerConfig
    errors: list[PromptError] = field(default_factory=list)

    def observe(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, out: Tensor) -> None:
        length = q.shape[2]
        # the same rows whatever the layer runs, so that what is tried instead is compared with like
        generator = torch.Generator().manual_seed(zlib.crc32(f"{length}/{layer}/{len(self.errors)}".encode()))
        first_of_last = length - max(1, length // LAST)
        drawn = [evenly_drawn(*part, ROWS, generator) for part in ((0, first_of_last), (first_of_last, length))]
        early, last = (sampled_rows(q, k, v, out, rows, scoring) for rows in drawn)
        share = first_of_last / length
        continued = {}
        for new in (new for new in CONTINUED if 2 * new <= length):
            queries = q[:, :, -new:]
            new_rows = evenly_drawn(0, new, ROWS, generator)
            continued_out = s2o_attention(queries, k, v, self.config, **scoring.arguments())
            one = sampled_rows(queries, k, v, continued_out, new_rows, scoring)
            continued[new] = one.mse, one.power
        self.errors.append(
            PromptError(
                mse=share * early.mse + (1 - share) * last.mse,
                power=share * early.power + (1 - share) * last.power,
                last=(last.mse, last.power),
                continued=continued,
                worst=_worst(early, last),
            )
        )


def _worst(*samples: RowSample) -> float:
    return float(torch.cat([sample.off.flatten() for sample in samples]).quantile(WORST))


def _measured(
    layer: PatchableLayer, streams: list[Stream], config: LayerConfig, chunks: Chunks | None
) -> tuple[list[Stream], LayerSample]:
    """The prompts after a layer with this configuration, and what was measured of the layer."""
    observed = _Observed(config)
    state = layer.state(config, observed.observe, chunks)
    after, densities = [], []
    for stream in streams:
        after.append(layer.patched(stream, state))
        densities.append(state.density)
    return after, LayerSample(tuple(observed.errors), statistics.fmean(densities))


@dataclass
class _NoiseFloor:
    """Prompts on their way through the dense model, whose full attention another backend computes.

    What two exact implementations differ by is what rounding does to a model's predictions: a KL of that size says
    nothing about sparse attention.
    """

    streams: list[Stream]
    backend: SDPBackend

    @classmethod
    def of(
        cls, loaded: LoadedModel, begun: Sequence[Stream], backend: SDPBackend = SDPBackend.FLASH_ATTENTION
    ) -> _NoiseFloor | None:
        """Of prompts before the first layer. None in float32 and on a CPU, where rounding is too small to matter."""
        if loaded.weights.device.type != "cuda" or loaded.model.dtype == torch.float32:
            return None
        return cls(list(begun), backend)

    def advance(self, layer: PatchableLayer) -> None:
        with sdpa_backend(self.backend):
            self.streams = [layer.dense(stream) for stream in self.streams]

    def pass_through(self, module: nn.Module, number: int) -> None:
        """Through a layer of another kind, which is as it is in the dense model."""
        self.streams = [stream.through(module, number) for stream in self.streams]

    def kl(self, prompts: Sequence[Prompt], dense: Sequence[Stream], logits: Callable[[Tensor], Tensor]) -> float:
        """The mean KL between the dense model and this one, after the last layer."""
        pairs = zip(prompts, dense, self.streams, strict=False)  # of the first prompts only
        kls = [compare(prompt, one.hidden, other.hidden, logits).kl for prompt, one, other in pairs]
        return max(0.0, statistics.fmean(kls))
