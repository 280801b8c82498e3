"""What certify prompts say of a model, prompt by prompt: errors of all rows, continued calls, predictions.

The prompts of one length move through the patched and the dense model together, one layer at a time, as in `verify`.
"""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from calibrate.curves.row_errors import worst_of
from calibrate.journal import Journal
from calibrate.model.layerwise import LayerwiseForward
from calibrate.model.logits import logits_on_device
from calibrate.model.memory import within_memory
from calibrate.model.models import LoadedModel
from calibrate.model.streams import DecoderLayer, Stream, begin
from calibrate.prompts.prompt import Prompt
from calibrate.proof.agreement import PromptAgreement, compare
from calibrate.proof.layers import KIND, C, Step, accept, errors_of_rows, evenly_drawn, through_layers
from calibrate.recipe import Budget
from calibrate.work.executor import Executor, executor_of
from calibrate.work.items import WorkerState, WorkItem
from calibrate.work.measured import measured
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.attention.dense import fastest_dense_attention
from s2o_runtime.huggingface import hf
from s2o_runtime.quantisation import as_cached
from s2o_runtime.reference.dense import sdpa_backend
from s2o_runtime.scoring import Scoring

CONTINUED = (64, 512)  # new tokens behind a cached prefix
LAST = 8  # the last part of a prompt is one of this many
WORST_ROWS = 1024  # drawn from a prompt, whose quantile says how wrong rows may be
NOISE_PROMPTS = 2  # prompts that the noise floor is measured on


@dataclass(frozen=True)
class PromptError:
    """What one layer is off by on one prompt.

    mse, power: Mean squared error and mean square of the dense output, over all rows. last: The same over the last
    eighth of the rows. continued: A number of new tokens, and the same of calls that bring only so many; numbers of
    which the prompt does not have twice as many tokens are missing. worst: `row_errors.worst_of` of the relative
    errors of `WORST_ROWS` rows in all heads. density: Mean over the heads.
    """

    mse: float
    power: float
    last: tuple[float, float]
    continued: Sequence[tuple[int, float, float]]
    worst: float
    density: float


@dataclass(frozen=True)
class LayerSample:
    """One layer: each prompt's errors, and its kind of text."""

    prompts: tuple[PromptError, ...]
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, prompts: Sequence[Prompt], of_prompts: Sequence[Mapping[str, Any]]) -> LayerSample:
        """From the results of a layer's steps on these prompts."""
        return cls(tuple(PromptError(**one) for one in of_prompts), tuple(prompt.domain for prompt in prompts))

    @property
    def density(self) -> float:
        """The mean over heads and prompts."""
        return statistics.fmean(prompt.density for prompt in self.prompts)

    def errors(self, budget: Budget) -> list[float]:
        """Each prompt's error in the budget's unit."""
        return [budget.error(prompt.mse, prompt.power) for prompt in self.prompts]

    @property
    def rel_mse(self) -> float:
        """The mean error over the dense output's mean square, both means over the prompts."""
        power = sum(prompt.power for prompt in self.prompts)
        return sum(prompt.mse for prompt in self.prompts) / max(power, 1e-30)

    def last_errors(self, budget: Budget) -> list[float]:
        """Each prompt's error over the last eighth of its rows."""
        return [budget.error(*prompt.last) for prompt in self.prompts]

    def continued_errors(self, budget: Budget) -> dict[int, list[float]]:
        """Each prompt's error of continued calls, by the number of new tokens."""
        errors: dict[int, list[float]] = {}
        for prompt in self.prompts:
            for new_tokens, mse, power in prompt.continued:
                errors.setdefault(new_tokens, []).append(budget.error(mse, power))
        return errors


@dataclass(frozen=True)
class LengthSample:
    """One length: its prompts, every layer, and what the model predicts for each prompt.

    noise_floor: The mean KL between two dense implementations, in nats; None where there is one only.
    """

    prompts: tuple[Prompt, ...]
    layers: tuple[LayerSample, ...]
    agreements: tuple[PromptAgreement, ...]
    noise_floor: float | None

    @property
    def kinds(self) -> list[str]:
        """The kind of text of each prompt."""
        return [prompt.domain for prompt in self.prompts]


def sample(
    model: LoadedModel | Executor,
    length: int,
    prompts: Sequence[Prompt],
    configured: C,
    revise: Callable[[C, int, int, LayerSample], C | None] = accept,
    on_step: Callable[[], object] = lambda: None,
    chunk: int | None = None,
    journal: Journal | None = None,
) -> tuple[C, LengthSample]:
    """Measure a configuration on prompts of one length.

    Args:
        model: Who runs it, or a loaded model, which then runs in this process.
        length: Tokens of every prompt.
        prompts: At least one.
        configured: What each layer runs.
        revise, on_step, chunk, journal: As `through_layers` takes them.

    Returns:
        What was accepted in the end, and what was measured of it.

    Raises:
        ModelError: inf or NaN came up.
        ResourceError: The GPU's memory ran out.
    """
    with executor_of(model) as executor:
        configured, passed = through_layers(
            executor, {length: prompts}, configured, CertifyStep, LayerSample.of, revise, on_step, chunk, journal
        )
        floor = _noise_floor(executor, length, prompts[:NOISE_PROMPTS], journal)
    return configured, LengthSample(tuple(prompts), passed[length].layers, passed[length].agreements, floor)


@dataclass(frozen=True)
class CertifyStep(Step):
    """What one prompt says of one layer: the fields of `PromptError`."""

    stage: str = "certifying"

    def errors(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, out: Tensor) -> dict[str, Any]:
        length = q.shape[2]
        dense = fastest_dense_attention(q, k, v, scoring)
        errors = errors_of_rows(out, dense)
        mse, power = errors.mse_and_power()
        cached_k, cached_v = (as_cached(tensor, self.runs.kv_cache_dtype) for tensor in (k, v))
        continued = []
        for new in (new for new in CONTINUED if 2 * new <= length):
            continued_out = s2o_attention(q[:, :, -new:], cached_k, cached_v, self.runs.config, **scoring.arguments())
            continued.append((new, *errors_of_rows(continued_out, dense[:, :, -new:]).mse_and_power()))
        # the same rows whatever the layer runs, so that what is tried instead is compared with like
        generator = torch.Generator().manual_seed(zlib.crc32(f"{length}/{self.layer}/{self.index}".encode()))
        rows = evenly_drawn(0, length, WORST_ROWS, generator).to(errors.off.device)
        return {
            "mse": mse,
            "power": power,
            "last": errors.mse_and_power(length - max(1, length // LAST)),
            "continued": continued,
            "worst": float(worst_of(errors.off[:, rows].flatten())),
        }


def _noise_floor(
    executor: Executor, length: int, prompts: Sequence[Prompt], journal: Journal | None
) -> float | None:  # fmt: skip
    """The mean KL between two dense implementations; None where rounding is too small to say anything."""
    items = [NoiseFloor(length, prompt.sha256) for prompt in prompts]
    kls = [result["kl"] for result in measured(items, executor, journal)]
    return None if None in kls else max(0.0, statistics.fmean(kls))


@dataclass(frozen=True)
class NoiseFloor(WorkItem):
    """The KL of one prompt between the dense model and the same with another implementation of dense attention.

    What two exact implementations differ by is what rounding does to a model's predictions: a KL of that size says
    nothing about sparse attention. Its result has it as `kl`: None in float32 and on a CPU, where rounding is too
    small to say anything.
    """

    length: int
    prompt: str
    stage: str = "noise"
    kind: ClassVar[str] = KIND

    @property
    def affinity(self) -> Hashable:
        return self.prompt

    @property
    def key(self) -> dict[str, Any]:
        return {"stage": self.stage, "length": self.length, "prompt": self.prompt}

    def __str__(self) -> str:
        return f"noise of rounding at {self.length} tokens"

    def run(self, worker: WorkerState) -> dict[str, float | None]:
        loaded = worker.loaded
        if loaded.weights.device.type != "cuda" or loaded.model.dtype == torch.float32:
            return {"kl": None}
        with within_memory(loaded.weights.device, self.length, loaded.weights.held, "measuring what rounding does"):
            return {"kl": noise(worker, worker.prompts[self.prompt], SDPBackend.FLASH_ATTENTION)}


@torch.no_grad()
def noise(worker: WorkerState, prompt: Prompt, backend: SDPBackend) -> float:
    """The KL between the dense model and the same, whose full attention another backend computes."""
    loaded = worker.loaded
    hf.register()
    worker.attend_with(hf.NAME)

    def through_backend(layer: DecoderLayer, stream: Stream) -> Stream:
        with sdpa_backend(backend):
            return layer.dense(stream)

    forward = LayerwiseForward(loaded, begin(loaded, [prompt.ids]) * 2)
    for layer in forward.layers:  # those of other kinds are as they are in the dense model
        forward.move([None, None if layer.attention is None else through_backend])
    dense, other = forward.streams
    with logits_on_device(loaded) as logits:
        return compare(prompt, dense.hidden, other.hidden, logits).kl
