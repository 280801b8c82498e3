"""Layer-by-layer comparison of the patched and the dense model, and each layer's error.

Errors are taken from dense attention on the same inputs, of all rows of a short prompt and of windows of a long one. A
few rows may carry a third of a prompt's error, so windows are drawn anew for each prompt, from every part of it and
with every row as likely: prompts then differ by what windows miss too, which bounds of their mean contain. Dense
attention's own rounding (in bfloat16 some 3e-6 of the output's mean square) only adds to the error.

A prompt at a layer is an item of work. The item says all that its result depends on: the prompt, what the layers
before ran, and what this one runs. Which worker takes it, and whether that one has the prompt at hand or begins again,
changes nothing but the time.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain, pairwise
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrate.curves.curves import compute_relative_errors, tile_worst
from calibrate.model.estimate import has_plenty_of_memory, wrap_out_of_memory
from calibrate.model.layers import Calls, DecoderLayer, LayerwiseForward, Stream, begin, put_layer_on_device
from calibrate.model.logits import compare_log_probs, count_rows_at_once, put_logits_on_device
from calibrate.prompts.prompt import Prompt
from calibrate.prompts.questions import EIGHTHS
from calibrate.recipe import WINDOW_ROWS, WINDOWS
from calibrate.work.executor import WorkerState, WorkItem
from s2o_runtime.attention.dense import fastest_dense_attention
from s2o_runtime.call import Scoring
from s2o_runtime.config import KvCacheDtype, LayerConfig
from s2o_runtime.huggingface import hf

UNPACKED_HISTORIES = 16  # that a process keeps
TILE_ROWS = 64  # rows of which the worst counts
PLACES = (0, 1, 8, 32, 128)  # the rows of a segment from which on its errors are told apart
COMPARED_ROWS = 2048  # of a prompt, about: those whose predictions are compared
KEPT_WITHIN = 1.0  # nats that an answer's log-probability may fall by


class ConfigSource(Protocol):
    """A profile, or a candidate for one: it has a configuration for every layer at every length."""

    @property
    def kv_cache_dtype(self) -> KvCacheDtype:
        """The type of the server's cache that keys and values are read from."""

    def layer_config(self, layer: int, length: int) -> LayerConfig:
        """Return a layer's configuration for a prompt of `length` tokens."""


def configure_call(source: ConfigSource, layer: int, length: int, keys: int) -> LayerConfig:
    """Return a layer's configuration for the part of a prompt of `length` tokens that ends with so many keys.

    It is that of the whole prompt, as in a server (`serving.fit.Request.length`), whose end alone has last rows.
    """
    config = source.layer_config(layer, length)
    return config if keys == length else replace(config, last_rows=0)


def measure_row_errors(out: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the errors of all rows of an attention output against dense attention's.

    Args:
        out, dense: [1, Hq, Lq, Dv] of one prompt, any floating type.

    Returns:
        The squared error and the dense output's square of each row, means over heads and Dv, float64 [2, Lq]; and each
        row's relative error (`curves.compute_relative_errors`), float32 [Hq, Lq].
    """
    heads, rows, value_dim = out.shape[1:]
    squares = torch.zeros(2, rows, dtype=torch.float64, device=out.device)
    relative = torch.empty(heads, rows, dtype=torch.float32, device=out.device)
    for head in range(heads):  # one at a time: a long output in float32 is large
        ours, truth = out[:, head : head + 1].float(), dense[:, head : head + 1].float()
        squared, power = (ours - truth).square().sum(-1)[0, 0], truth.square().sum(-1)[0, 0]
        squares[0] += squared
        squares[1] += power
        relative[head] = compute_relative_errors(squared, power)
    return squares / (heads * value_dim), relative


def find_part_edges(length: int) -> list[int]:
    """Return where the parts of a prompt begin, each of which has a window, and where the last one ends."""
    return [length * part // WINDOWS for part in range(WINDOWS + 1)]


def draw_windows(prompt: Prompt) -> list[range]:
    """Draw the rows, in order, whose errors stand for all rows of a prompt: of a long one a window of each part.

    A window begins anywhere in its part and goes on at the part's begin, so that no row is more likely than another.
    """
    length, draw = prompt.length, random.Random(prompt.sha256)
    if length <= WINDOWS * WINDOW_ROWS:
        return [range(length)]
    windows = []
    for edge, end in pairwise(find_part_edges(length)):
        first = draw.randrange(edge, end, TILE_ROWS)
        beyond = range(edge, edge + max(0, first + WINDOW_ROWS - end))
        windows += [window for window in (beyond, range(first, min(first + WINDOW_ROWS, end))) if window]
    return windows


def draw_first_rows(windows: Sequence[range], length: int, segment: int) -> list[range]:
    """Draw the first row of a segment behind each part's begin, as a window each, but for those that the windows hold.

    Of long segments the windows hold few first rows, and single ones of these may err a hundred times as much.
    """
    begins = {-(-edge // segment) * segment for edge in find_part_edges(length)[1:-1]}
    missing = (row for row in sorted(begins) if row < length and not any(row in window for window in windows))
    return [range(row, row + 1) for row in missing]


def select_rows(tensor: Tensor, windows: Iterable[range]) -> Tensor:
    """Return the rows of windows of a tensor [..., L, D], as [..., R, D]."""
    return torch.cat([tensor[..., window.start : window.stop, :] for window in windows], -2)


def measure_places(squares: Tensor, rows: Tensor, calls: Iterable[tuple[int, LayerConfig]]) -> list[list[float]]:
    """Compute the errors by the rows' place in their segments, without rows that are dense as a call's last.

    Args:
        squares: the squared error and the dense output's square of each row, float64 [2, R].
        rows: their positions in the prompt, int64 [R].
        calls: the last row and the configuration of each call that computed the prompt, in order.

    Returns:
        The mean squared error and the mean square of the rows from each of `PLACES` to the next; 0 without such rows.
    """
    summed = torch.cat([squares, torch.ones_like(squares[:1])])
    sums, begin = summed.new_zeros(len(summed), len(PLACES)), 0
    bounds = torch.tensor(PLACES, device=rows.device)
    for end, config in calls:
        chosen = (rows >= begin) & (rows < begin + config.find_first_dense_row(end - begin))
        places = torch.bucketize((rows[chosen] - begin) % config.segment, bounds, right=True) - 1
        sums += summed[:, chosen] @ F.one_hot(places, len(PLACES)).to(summed)
        begin = end
    return (sums[:2] / sums[2].clamp(min=1)).T.tolist()


@dataclass(frozen=True)
class LayerConfigAt:
    """The configuration of one layer for prompts of one length."""

    config: LayerConfig  # of a call with the whole prompt
    chunk: int | None = None  # tokens that the layer is fed at once; None for whole prompts
    by_keys: tuple[tuple[int, LayerConfig], ...] = ()  # in chunks: the keys there are after each, and its configuration
    kv_cache_dtype: KvCacheDtype = "auto"  # "fp8" if S2O reads keys and values as such a cache has them

    @classmethod
    def from_source(cls, source: ConfigSource, chunk: int | None, layer: int, length: int) -> LayerConfigAt:
        """Return a layer's configuration, and of a prompt that is fed in chunks that of each chunk."""
        config, cache = source.layer_config(layer, length), source.kv_cache_dtype
        if chunk is None or length <= chunk:
            return cls(config, kv_cache_dtype=cache)
        ends = (*range(chunk, length, chunk), length)
        return cls(config, chunk, tuple((end, configure_call(source, layer, length, end)) for end in ends), cache)

    @cached_property
    def digest(self) -> str:
        """A hash of the fields. Keys of journals contain it, so it is of a text that does not change with the class."""
        cache = () if self.kv_cache_dtype == "auto" else (self.kv_cache_dtype,)
        return hashlib.sha256(repr((self.config, self.chunk, self.by_keys, *cache)).encode()).hexdigest()


class LayerHistory:
    """The configurations of the layers before one. A process unpickles it once, however many items bring it."""

    def __init__(self, configs: tuple[LayerConfigAt, ...] = (), digest: str = "") -> None:
        self.configs, self.digest = configs, digest
        self._packed: bytes | None = None

    def append(self, config: LayerConfigAt) -> LayerHistory:
        """Return the history with one more layer."""
        digest = hashlib.sha256(f"{self.digest}/{config.digest}".encode()).hexdigest()
        return LayerHistory((*self.configs, config), digest)

    def __reduce__(self) -> tuple[Callable[[str, bytes], LayerHistory], tuple[str, bytes]]:
        if self._packed is None:
            self._packed = pickle.dumps(self.configs)
        return _unpack_history, (self.digest, self._packed)


@lru_cache(maxsize=UNPACKED_HISTORIES)
def _unpack_history(digest: str, packed: bytes) -> LayerHistory:
    return LayerHistory(pickle.loads(packed), digest)


def make_layer_state(
    layer: DecoderLayer, config: LayerConfigAt, observer: hf.Observer | None = None, chunks: bool = True
) -> hf.LayerState:
    """Make the state that patches a layer of full attention.

    observer: sees its attention's inputs and output. chunks: whether it is fed in the chunks that `config` has.
    """
    assert layer.row is not None
    chunk = config.chunk if chunks else None
    # no meter: a state's first calls are all metered, which would be timed too
    return hf.ServerLikeState(
        layer.row,
        (lambda keys: config.config) if chunk is None else dict(config.by_keys).__getitem__,
        min_length=0,
        observer=observer,
        meter=None,
        chunk=chunk,
        kv_cache_dtype=config.kv_cache_dtype,
    )


class PromptForward:
    """One prompt, by its hash, in the patched model before some decoder layer, and beside it in the dense model.

    index: the prompt's number among those of its length. compared: whether predictions are compared; else, and where
    the worker knows already what the dense model predicts, that one does not move along.
    """

    def __init__(self, worker: WorkerState, prompt: str, index: int = 0, compared: bool = True) -> None:
        self._worker, self._prompt, self._name, self._index = worker, worker.prompts[prompt], prompt, index
        self._with_dense = compared and prompt not in worker.dense["hidden states"]
        self._start_over()

    @torch.no_grad()
    def _start_over(self) -> None:
        calls: dict[int, Calls] = self._worker.cached("calls of patched layers", dict)
        (stream,) = begin(self._worker.loaded, [self._prompt.ids], calls)
        streams = [replace(stream, prompt=self._index)] * (1 + self._with_dense)
        self._forward = LayerwiseForward(self._worker.loaded, streams)
        self._configs: tuple[LayerConfigAt, ...] = ()
        self.tried: tuple[LayerConfigAt, Stream] | None = None  # the next layer's output, in case it is accepted
        self._dense: Tensor | None = None

    def move_to(self, number: int, history: LayerHistory) -> None:
        """Move to before decoder layer `number`, or the end: on from here, or from the model's beginning.

        history: the configurations of at least the layers of full attention before it.
        """
        if self._forward.number > number or history.configs[: len(self._configs)] != self._configs:
            self._start_over()
        while self._forward.number < number:
            row = self._forward.next_layer.row
            if row is None:
                self._forward.move()
                continue
            config = history.configs[row]
            self._forward.move([partial(self._patch_or_reuse, config), None][: len(self._forward.streams)])
            self._configs, self.tried, self._dense = (*self._configs, config), None, None

    def _patch_or_reuse(self, config: LayerConfigAt, layer: DecoderLayer, stream: Stream) -> Stream:
        if self.tried is not None and self.tried[0] == config:
            return self.tried[1]
        return layer.patched(stream, make_layer_state(layer, config))

    @contextmanager
    def enter_next_layer(self) -> Iterator[tuple[DecoderLayer, Stream]]:
        """Yield the next layer, its parameters on the device, and the patched prompt before it."""
        layer = self._forward.next_layer
        with torch.no_grad(), put_layer_on_device(self._worker.loaded, layer):
            yield layer, self._forward.streams[0]

    def measure(self, config: LayerConfigAt, observer: hf.Observer) -> float:
        """Run the next layer on the patched prompt, without moving on, and return the density."""
        with self.enter_next_layer() as (layer, stream):
            state = make_layer_state(layer, config, observer)
            self.tried = config, layer.patched(stream, state)
        return state.density

    def compute_dense(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return the next layer's dense attention, [1, Hq, R, Dv], computed at most once while memory is plenty."""
        out = compute() if self._dense is None else self._dense  # the same whatever the layer is tried with
        self._dense = out if has_plenty_of_memory(out.device) else None
        return out

    @torch.no_grad()
    def compare(self) -> PromptAgreement:
        """Compare what both models predict, after all layers; the worker keeps the dense model's part of it."""
        rows, known = list_compared_rows(self._prompt), self._worker.dense["hidden states"]
        patched, *dense = (stream.hidden[:, rows.to(stream.hidden.device)] for stream in self._forward.streams)
        if dense:
            known[self._name] = dense[0].cpu()
        with put_logits_on_device(self._worker.loaded) as logits:
            return compare(self._prompt, rows, known[self._name].to(patched.device), patched, logits)


@dataclass(frozen=True)
class ProofItem(WorkItem):
    """A measurement of prompts of one length in tokens; `stage` is the purpose, a word in the keys of journals."""

    length: int
    stage: str = field(kw_only=True)
    kind: ClassVar[str] = "proof"

    @property
    def inputs(self) -> dict[str, Any]:
        """Everything beside length and stage that the result depends on, as JSON for a journal's key."""
        raise NotImplementedError

    @property
    def key(self) -> dict[str, Any]:
        return {"stage": self.stage, "length": self.length, **self.inputs}

    def use_s2o(self, worker: WorkerState) -> None:
        """Let the model compute attention by S2O's function, which is dense in layers that are not patched."""
        hf.register()
        worker.attend_with(hf.NAME)

    def within_memory(self, worker: WorkerState, activity: str) -> AbstractContextManager[None]:
        """Name the activity and the prompt's length if the GPU's memory runs out inside the block."""
        return wrap_out_of_memory(worker.loaded.weights.device, self.length, worker.loaded.weights.held, activity)


@dataclass(frozen=True)
class LayerProofItem(ProofItem):
    """One prompt at one layer, as an item of work.

    Of the rows of `draw_windows` its result has the mean squared error and the mean square of the dense output as
    `all_rows`, the same over each eighth of them as `eighths`, and the largest relative error of a row in each tile as
    `tiles`, float32 [tiles]; of these and of `draw_first_rows` the errors by place in the segment (`measure_places`) as
    `places`; and the mean density over heads as `density`.
    """

    prompt: str  # its hash
    index: int  # the prompt's number among those of its length
    layer: int  # its row in the profile
    before: LayerHistory
    config: LayerConfigAt
    compared: bool  # whether both models' predictions are compared after the last layer

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
            "runs": self.config.digest,
            "parts": [EIGHTHS, *PLACES],
            "rows": [WINDOWS, WINDOW_ROWS, COMPARED_ROWS, "first rows"],
        }

    def __str__(self) -> str:
        return f"{self.stage}: layer {self.layer} of prompt {self.index} of {self.length} tokens"

    def run(self, worker: WorkerState) -> dict[str, Any]:
        result: dict[str, Any] = {}
        config, windows = self.config.config, draw_windows(worker.prompts[self.prompt])
        measured, drawn = windows + draw_first_rows(windows, self.length, config.segment), sum(map(len, windows))

        def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, out: Tensor) -> None:
            def compute_truth() -> Tensor:
                ends = [(slice(rows.start, rows.stop), slice(rows.stop)) for rows in measured]
                calls = ((q[:, :, rows], k[:, :, keys], v[:, :, keys]) for rows, keys in ends)
                return torch.cat([fastest_dense_attention(*call, scoring) for call in calls], 2)

            is_dense = config.is_dense and self.config.chunk is None  # what ran is dense attention itself
            ours, rows = select_rows(out, measured), torch.tensor([*chain(*measured)], device=out.device)
            squares, relative = measure_row_errors(ours, ours if is_dense else forward.compute_dense(compute_truth))
            result["all_rows"] = tuple(squares[:, :drawn].mean(1).tolist())
            result["eighths"] = [eighth.mean(1).tolist() for eighth in squares[:, :drawn].tensor_split(EIGHTHS, 1)]
            calls = self.config.by_keys or ((self.length, config),)
            result["places"] = measure_places(squares, rows, calls)
            result["tiles"] = tile_worst(relative[:, :drawn], TILE_ROWS).flatten().cpu()

        number = worker.loaded.geometry.get_layer_number(self.layer)
        with self._forward_before(worker, number) as forward:
            density = forward.measure(self.config, observe)
        return {**result, "density": density}

    @contextmanager
    def _forward_before(self, worker: WorkerState, number: int) -> Iterator[PromptForward]:
        """Yield the prompt before a decoder layer."""
        with self.within_memory(worker, f"{self.stage} layer {worker.loaded.geometry.get_layer_number(self.layer)}"):
            self.use_s2o(worker)
            forward = worker.cached(
                self.affinity, lambda: PromptForward(worker, self.prompt, self.index, self.compared)
            )
            forward.move_to(number, self.before)
            yield forward


@dataclass(frozen=True)
class AgreementItem(LayerProofItem):
    """The predictions of both models for a prompt, after the layers of `before`; `layer` and `config` are not read."""

    @property
    def inputs(self) -> dict[str, Any]:
        return {**super().inputs, "last": True}

    def __str__(self) -> str:
        return f"{self.stage}: predictions of prompt {self.index} of {self.length} tokens"

    def run(self, worker: WorkerState) -> dict[str, Any]:
        with self._forward_before(worker, worker.loaded.geometry.decoder_layers) as forward:
            agreement = forward.compare()
        worker.kept.pop(self.affinity)
        return vars(agreement)


@dataclass(frozen=True)
class PromptAgreement:
    """Agreement between the dense and the patched model's predictions for one prompt.

    An answer is found if each of its tokens is the most likely one after those before it. It is kept if the patched
    model finds it too, or if its log-probability fell by less than `KEPT_WITHIN`: where a model is undecided, any
    change of rounding flips what it finds, which says nothing about what it can see.

    """

    kl: float  # mean over the compared rows of KL(dense || patched), in nats; rounding may make it negative
    top1: float  # the share of these rows where both find the same token most likely
    found: int  # of the prompt's answers, by the dense model
    kept: int  # of these, by the patched model


def list_compared_rows(prompt: Prompt) -> Tensor:
    """Return the rows whose predictions are compared, int64 [R]: some of its windows, then those before its answers."""
    drawn = [*chain(*draw_windows(prompt))]
    answering = chain(*(range(first - 1, end - 1) for first, end in prompt.answers))
    return torch.tensor([*drawn[:: max(1, len(drawn) // COMPARED_ROWS)], *answering])


def compare(
    prompt: Prompt, rows: Tensor, dense: Tensor, patched: Tensor, logits: Callable[[Tensor], Tensor]
) -> PromptAgreement:
    """Compare the two models' predictions of a prompt.

    rows: `list_compared_rows`, int64 [R]. dense, patched: the hidden states [1, R, H] of these after the last layer.
    logits: [1, R, H] -> [1, R, V].
    """
    following = prompt.ids[(rows + 1) % prompt.length].to(dense.device)
    sampled = len(rows) - sum(end - first for first, end in prompt.answers)  # behind them are those before the answers
    at_once = count_rows_at_once(logits(dense[:, :1]).shape[-1])
    pieces = []
    for first in range(0, len(rows), at_once):
        piece = slice(first, first + at_once)
        both = [logits(hidden[:, piece])[0].float().log_softmax(-1) for hidden in (dense, patched)]
        agreement = compare_log_probs(*both)
        log_probabilities = (model.gather(1, following[piece, None])[:, 0].double() for model in both)
        pieces.append((agreement.kl, agreement.dense_tokens, agreement.tokens, *log_probabilities))
    kls, *others = map(torch.cat, zip(*pieces, strict=True))
    by_dense, by_patched, log_dense, log_patched = (values.cpu() for values in others)
    finds_dense, finds_patched = by_dense.eq(following.cpu()), by_patched.eq(following.cpu())
    ends = accumulate((end - first for first, end in prompt.answers), initial=sampled)
    answers = [slice(*span) for span in pairwise(ends) if finds_dense[slice(*span)].all()]
    kept = [
        bool(finds_patched[span].all()) or float(log_dense[span].sum()) - float(log_patched[span].sum()) < KEPT_WITHIN
        for span in answers
    ]
    return PromptAgreement(
        kl=float(kls[:sampled].mean()),
        top1=float((by_dense == by_patched)[:sampled].double().mean()),
        found=len(answers),
        kept=sum(kept),
    )
