"""Layer-by-layer comparison of the patched and the dense model, and each layer's error over all rows.

A few rows of a prompt may carry a third of its error, so that an error of some rows says little about all: errors are
of all rows, against dense attention. Dense attention in the model's own type costs a prefill no more than one more
attention, and its rounding (in bfloat16 some 3e-6 of the output's mean square) only adds to the error.

A prompt at a layer is an item of work. The item says all that its result depends on: the prompt, what the layers
before ran, and what this one runs. Which worker takes it, and whether that one has the prompt at hand or begins again,
changes nothing but the time.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from calibrate.curves.curves import relative_errors, tile_worst
from calibrate.model.estimate import plenty_is_free, within_memory
from calibrate.model.layers import DecoderLayer, LayerwiseForward, Stream, begin, layer_on_device
from calibrate.model.logits import agreement, logits_on_device, rows_at_once
from calibrate.prompts.prompt import Prompt
from calibrate.work.executor import WorkerState, WorkItem
from s2o_runtime.attention.dense import fastest_dense_attention
from s2o_runtime.call import Scoring
from s2o_runtime.config import KvCacheDtype, LayerConfig
from s2o_runtime.huggingface import hf

PREFIXES = 16  # that a process keeps unpacked
ANSWER_ROWS, ANSWER_PART = 256, 8  # the rows that answer: so many last ones, and one in so many at most
TILE_ROWS = 64  # rows of which the worst counts
KEPT_WITHIN = 1.0  # nats


class Configured(Protocol):
    """What says what layers run, and can be proven: a profile, or a candidate for one."""

    @property
    def min_length(self) -> int:
        """The shortest calibrated length."""

    def layer_config(self, layer: int, length: int) -> LayerConfig:
        """What a layer runs for a prompt of `length` tokens."""

    @property
    def kv_cache_dtype(self) -> KvCacheDtype:
        """The type of the server's cache that keys and values are read from."""


C = TypeVar("C", bound=Configured)


def answer_rows(length: int) -> int:
    """How many of a prompt's last rows count as those that answer."""
    return min(ANSWER_ROWS, max(1, length // ANSWER_PART))


@dataclass(frozen=True)
class RowErrors:
    """What every row of one output is off by.

    squares, powers: means over heads and Dv of the squared error and of the dense output's squares, float64 [Lq]. off:
    Each row's relative error (`row_errors.row_errors`), float32 [Hq, Lq].
    """

    squares: Tensor
    powers: Tensor
    off: Tensor

    def mse_and_power(self, first: int = 0) -> tuple[float, float]:
        """The mean squared error and the mean square of the dense output, over the rows from `first`."""
        mse, power = torch.stack([self.squares[first:], self.powers[first:]]).mean(1).tolist()
        return mse, power


def errors_of_rows(out: Tensor, dense: Tensor) -> RowErrors:
    """The errors of all rows.

    Args:
        out, dense: [1, Hq, Lq, Dv] of one prompt, any floating type: an attention output, and dense attention's.
    """
    heads, rows, value_dim = out.shape[1:]
    squares, powers = torch.zeros(2, rows, dtype=torch.float64, device=out.device)
    off = torch.empty(heads, rows, dtype=torch.float32, device=out.device)
    for head in range(heads):  # one at a time: a long output in float32 is large
        ours, truth = out[:, head : head + 1].float(), dense[:, head : head + 1].float()
        squared, power = (ours - truth).square().sum(-1)[0, 0], truth.square().sum(-1)[0, 0]
        squares += squared
        powers += power
        off[head] = relative_errors(squared, power)
    return RowErrors(squares / (heads * value_dim), powers / (heads * value_dim), off)


@dataclass(frozen=True)
class LayerSetting:
    """What one layer runs for prompts of one length.

    chunk: tokens that it is fed at once; None for whole prompts. by_keys: of a layer that is fed in chunks, what it
    runs behind each number of keys. kv_cache_dtype: "fp8" if S2O reads keys and values as such a cache has them.
    """

    config: LayerConfig
    chunk: int | None = None
    by_keys: tuple[tuple[int, LayerConfig], ...] = ()
    kv_cache_dtype: KvCacheDtype = "auto"

    @classmethod
    def of(cls, configured: Configured, chunk: int | None, layer: int, length: int) -> LayerSetting:
        """What a layer runs in a configuration.

        A server feeds prompts in chunks, each a call behind those before it. Every chunk follows the configuration of
        the keys that there are by then, as the runtime would choose it, and is dense while these are fewer than the
        shortest calibrated length. Only those of the last chunk can be last rows.
        """
        config, cache = configured.layer_config(layer, length), configured.kv_cache_dtype
        if chunk is None or length <= chunk:
            return cls(config, kv_cache_dtype=cache)
        by_keys = []
        for keys in (*range(chunk, length, chunk), length):
            chunk_config = configured.layer_config(layer, keys)
            chunk_config = chunk_config if keys == length else replace(chunk_config, last_rows=0)
            by_keys.append((keys, chunk_config.as_dense() if keys < configured.min_length else chunk_config))
        return cls(config, chunk, tuple(by_keys), cache)

    @cached_property
    def digest(self) -> str:
        cache = () if self.kv_cache_dtype == "auto" else (self.kv_cache_dtype,)
        return hashlib.sha256(repr((self.config, self.chunk, self.by_keys, *cache)).encode()).hexdigest()


class ConfigPrefix:
    """What the layers before one ran. It is unpacked once in a process, however many items bring it."""

    def __init__(self, runs: tuple[LayerSetting, ...] = (), digest: str = "") -> None:
        self.runs, self.digest = runs, digest
        self._packed: bytes | None = None

    def then(self, run: LayerSetting) -> ConfigPrefix:
        """With one more layer."""
        digest = hashlib.sha256(f"{self.digest}/{run.digest}".encode()).hexdigest()
        return ConfigPrefix((*self.runs, run), digest)

    def __reduce__(self) -> tuple[Callable[[str, bytes], ConfigPrefix], tuple[str, bytes]]:
        if self._packed is None:
            self._packed = pickle.dumps(self.runs)
        return _unpack, (self.digest, self._packed)


@lru_cache(maxsize=PREFIXES)
def _unpack(digest: str, packed: bytes) -> ConfigPrefix:
    return ConfigPrefix(pickle.loads(packed), digest)


def layer_state(
    layer: DecoderLayer, runs: LayerSetting, observer: hf.Observer | None = None, chunks: bool = True
) -> hf.LayerState:
    """What patches a layer of full attention.

    Args:
        layer: the layer.
        runs: what it runs.
        observer: sees its attention's inputs and output.
        chunks: whether it is fed in the chunks that `runs` has; else whole.
    """
    assert layer.row is not None
    chunk = runs.chunk if chunks else None
    config_at = (lambda keys: runs.config) if chunk is None else dict(runs.by_keys).__getitem__
    # a state's first calls are all metered, which would be timed too
    return hf.ServerLikeState(
        layer.row, config_at, min_length=0, observer=observer, meter=None, chunk=chunk,
        kv_cache_dtype=runs.kv_cache_dtype,
    )  # fmt: skip


class PairForward:
    """One prompt in the patched and in the dense model, before some layer of full attention.

    Args:
        worker: what the process keeps.
        prompt: the prompt's hash.
        index: which of its length's prompts it is.
    """

    def __init__(self, worker: WorkerState, prompt: str, index: int) -> None:
        self._worker, self._prompt, self._index = worker, worker.prompts[prompt], index
        self._runs: tuple[LayerSetting, ...]
        self._tried: tuple[LayerSetting, Stream] | None
        self._dense: Tensor | None
        self._begin()

    def move_to(self, prefix: ConfigPrefix) -> None:
        """Move to where these layers have run: on from here, or from the model's beginning."""
        if prefix.runs[: len(self._runs)] != self._runs:
            self._begin()
        for run in prefix.runs[len(self._runs) :]:
            self._pass()
            self._forward.move([partial(self._accepted, run), None])
            self._runs, self._tried, self._dense = (*self._runs, run), None, None

    @torch.no_grad()
    def measure(self, run: LayerSetting, observer: hf.Observer) -> float:
        """Let the next layer run; it is not moved through yet.

        Args:
            run: what it runs.
            observer: sees its attention's inputs and output.

        Returns:
            The density.
        """
        self._pass()
        layer = self._forward.next_layer
        with layer_on_device(self._worker.loaded, layer):
            state = layer_state(layer, run, observer)
            self._tried = run, layer.patched(self._forward.streams[0], state)
        return state.density

    def dense(self, compute: Callable[[], Tensor]) -> Tensor:
        """The next layer's dense attention, [1, Hq, L, Dv], the same whatever it runs: kept while memory is plenty."""
        if self._dense is not None:
            return self._dense
        out = compute()
        self._dense = out if plenty_is_free(out.device) else None
        return out

    @torch.no_grad()
    def agreement(self) -> PromptAgreement:
        """What both models predict in the end, after all layers."""
        self._forward.move_to(len(self._forward.layers))
        patched, dense = self._forward.streams
        with logits_on_device(self._worker.loaded) as logits:
            return compare(self._prompt, dense.hidden, patched.hidden, logits)

    @torch.no_grad()
    def _begin(self) -> None:
        (stream,) = begin(self._worker.loaded, [self._prompt.ids], self._worker.cached("calls of patched layers", dict))
        self._forward = LayerwiseForward(self._worker.loaded, [replace(stream, prompt=self._index)] * 2)
        self._runs, self._tried, self._dense = (), None, None

    def _pass(self) -> None:
        """Move to the next layer of full attention."""
        while self._forward.next_layer.row is None:
            self._forward.move()

    def _accepted(self, run: LayerSetting, layer: DecoderLayer, stream: Stream) -> Stream:
        if self._tried is not None and self._tried[0] == run:
            return self._tried[1]
        return layer.patched(stream, layer_state(layer, run))


@dataclass(frozen=True)
class ProofItem(WorkItem):
    """What is measured of prompts of one length in the proof.

    length: in tokens. stage: what it is done for, in a word.
    """

    length: int
    stage: str = field(kw_only=True)
    kind: ClassVar[str] = "proof"

    @property
    def inputs(self) -> dict[str, Any]:
        """What its result depends on beside its length and what it is done for; for a journal."""
        raise NotImplementedError

    @property
    def key(self) -> dict[str, Any]:
        return {"stage": self.stage, "length": self.length, **self.inputs}

    def patching(self, worker: WorkerState) -> None:
        """Let the model compute attention by S2O's function, which is dense where a layer runs nothing else."""
        hf.register()
        worker.attend_with(hf.NAME)

    def within_memory(self, worker: WorkerState, what: str) -> AbstractContextManager[None]:
        """Say what did not fit, and how long the prompt is, if the GPU's memory runs out inside the block."""
        return within_memory(worker.loaded.weights.device, self.length, worker.loaded.weights.held, what)


@dataclass(frozen=True)
class LayerProofItem(ProofItem):
    """One prompt at one layer, as an item of work.

    index: which of its length's prompts it is. before: what the layers before ran. runs: what this one runs.

    Its result has the mean squared error and the mean square of the dense output over all rows as `all_rows`, the same
    over the rows that answer as `last_rows`, the largest relative error of a row in each tile of rows as `tiles`,
    float32 [tiles], and the mean density over heads as `density`.
    """

    prompt: str
    index: int
    layer: int
    before: ConfigPrefix
    runs: LayerSetting

    @property
    def affinity(self) -> Hashable:
        return self.stage, self.length, self.index

    @property
    def inputs(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "index": self.index,
            "layer": self.layer,
            "before": self.before.digest,
            "runs": self.runs.digest,
            "last": answer_rows(self.length),
        }

    def __str__(self) -> str:
        return f"{self.stage}: layer {self.layer} of prompt {self.index} of {self.length} tokens"

    def run(self, worker: WorkerState) -> dict[str, Any]:
        result: dict[str, Any] = {}

        def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, out: Tensor) -> None:
            whole = self.runs.config.is_dense and self.runs.chunk is None  # what ran is dense attention itself
            dense = out if whole else forward.dense(lambda: fastest_dense_attention(q, k, v, scoring))
            errors = errors_of_rows(out, dense)
            result["all_rows"] = errors.mse_and_power()
            result["last_rows"] = errors.mse_and_power(self.length - answer_rows(self.length))
            result["tiles"] = tile_worst(errors.off, TILE_ROWS).flatten().cpu()

        with self._measuring(worker):
            forward = self._forward_here(worker)
            density = forward.measure(self.runs, observe)
        return {**result, "density": density}

    def _forward_here(self, worker: WorkerState) -> PairForward:
        """The prompt before this layer."""
        self.patching(worker)
        forward = worker.cached(self.affinity, lambda: PairForward(worker, self.prompt, self.index))
        forward.move_to(self.before)
        return forward

    def _measuring(self, worker: WorkerState) -> AbstractContextManager[None]:
        return self.within_memory(worker, f"{self.stage} layer {worker.loaded.geometry.layer_number(self.layer)}")


@dataclass(frozen=True)
class AgreementItem(LayerProofItem):
    """What both models predict of a prompt after all layers, which `before` has; `layer` and `runs` are not read."""

    @property
    def inputs(self) -> dict[str, Any]:
        return {**super().inputs, "last": True}

    def __str__(self) -> str:
        return f"{self.stage}: predictions of prompt {self.index} of {self.length} tokens"

    def run(self, worker: WorkerState) -> dict[str, Any]:
        with self._measuring(worker):
            agreement = self._forward_here(worker).agreement()
        worker.kept.pop(self.affinity)
        return vars(agreement)


@dataclass(frozen=True)
class PromptAgreement:
    """How alike the dense and the patched model predict one prompt.

    kl: the mean over positions of KL(dense || patched) of the next token, in nats; rounding can leave a little less
    than nothing. top1: the share of positions where both find the same token most likely. found: how many of the
    prompt's answers the dense model finds. kept: how many of these the patched model keeps.

    An answer is found if each of its tokens is the most likely one after those before it. It is kept if the patched
    model finds it too, or if its log-probability fell by less than `KEPT_WITHIN`: where a model is undecided, any
    change of rounding flips what it finds, which says nothing about what it can see.
    """

    kl: float
    top1: float
    found: int
    kept: int


def compare(prompt: Prompt, dense: Tensor, patched: Tensor, logits: Callable[[Tensor], Tensor]) -> PromptAgreement:
    """Compare the two models' predictions of a prompt.

    Args:
        prompt: the prompt.
        dense, patched: hidden states [1, L, H] after the last layer.
        logits: [1, R, H] -> [1, R, V].
    """
    following = torch.roll(prompt.ids, -1).to(dense.device)
    rows = rows_at_once(logits(dense[:, :1]).shape[-1])
    kls: list[Tensor] = []
    tokens: list[list[Tensor]] = [[], []]
    log_probabilities: list[list[Tensor]] = [[], []]
    pieces = zip(
        *(torch.split(tensor, rows, 1) for tensor in (dense, patched)), torch.split(following, rows), strict=True
    )
    for *hidden, next_tokens in pieces:
        both = [logits(piece)[0].float().log_softmax(-1) for piece in hidden]
        compared = agreement(*both)
        kls.append(compared.kl)
        for model, best in enumerate((compared.dense_tokens, compared.tokens)):
            tokens[model].append(best)
            log_probabilities[model].append(both[model].gather(1, next_tokens[:, None])[:, 0].double())
    by_dense, by_patched = (
        _Predicted(prompt, torch.cat(best).cpu(), torch.cat(next_log_prob).cpu())
        for best, next_log_prob in zip(tokens, log_probabilities, strict=True)
    )
    answers = [span for span in prompt.answers if by_dense.finds(span)]
    kept = [
        by_patched.finds(span) or by_dense.log_probability(span) - by_patched.log_probability(span) < KEPT_WITHIN
        for span in answers
    ]
    return PromptAgreement(
        kl=float(torch.cat(kls).mean()),
        top1=float((by_dense.best == by_patched.best).double().mean()),
        found=len(answers),
        kept=sum(kept),
    )


@dataclass(frozen=True)
class _Predicted:
    """What one model says of a prompt: the most likely token after each, int64 [L], and the log-probability of the one
    that follows, float64 [L]."""

    prompt: Prompt
    best: Tensor
    next_log_prob: Tensor

    def finds(self, span: tuple[int, int]) -> bool:
        first, end = span
        return bool((self.best[first - 1 : end - 1] == self.prompt.ids[first:end]).all())

    def log_probability(self, span: tuple[int, int]) -> float:
        first, end = span
        return float(self.next_log_prob[first - 1 : end - 1].sum())
