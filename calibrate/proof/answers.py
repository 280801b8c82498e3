"""KL(dense || patched) at the rows that answer, behind a finished prefill.

The patched model prefills a prompt once. Each question (`prompts.questions`) is then a turn of its own behind that
cache, and a further question a second turn behind it. A turn's own rows are dense, as they are where few queries stand
behind a long prefix, so what differs is what the prefill left in the cache. Answers are the dense model's own: the
document's, revised towards them. Those of a model that is not whole on the device are the document's as they are,
because revising would read the weights again for each pass.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from transformers import DynamicCache

from calibrate.model.layers import (
    Calls,
    DecoderLayer,
    LayerwiseForward,
    Stream,
    begin,
    list_decoder_layers,
)
from calibrate.model.logits import compare_log_probs, put_logits_on_device
from calibrate.model.models import LoadedModel
from calibrate.prompts.prompt import Prompt
from calibrate.prompts.questions import Question, ask_about
from calibrate.proof.layers import (
    KEPT_WITHIN,
    ConfigSource,
    LayerConfigAt,
    LayerHistory,
    ProofItem,
    make_layer_state,
)
from calibrate.proof.verify import Prover
from calibrate.work.executor import WorkerState, measure_items, split_among_workers
from s2o_runtime.errors import ModelError
from s2o_runtime.fields import pluralize
from s2o_runtime.huggingface import hf
from s2o_runtime.reference.dense import use_sdpa_backend

NOISE = "noise"  # the variant that is dense attention by another kernel
CACHE_BYTES = 16 << 30  # that copies of a prompt's cache may have, for turns that run at once
MAX_REVISIONS = 4  # of a guessed answer, until the dense model would give each of its tokens
Patch = Callable[[], AbstractContextManager[None]]  # inside the block a prefill is another variant's


@dataclass(frozen=True)
class PromptAnswers:
    """The answers to one prompt's questions by one variant of the model, beside the dense model's.

    first: the mean KL of each question's answer, in nats per token. second: of the next question's, asked behind it.
    eighths: of each question, the part of the prompt that it is about. found: the needles that the prompt itself asks
    for and the dense model finds. kept: those of them that this variant finds too, or nearly (`layers.KEPT_WITHIN`).
    """

    first: tuple[float, ...]
    second: tuple[float, ...]
    eighths: tuple[int, ...]
    found: int
    kept: int

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PromptAnswers:
        """Return the answers that an item of work or a journal has as JSON."""
        parts: dict[str, Any] = {name: tuple(part) if isinstance(part, list) else part for name, part in value.items()}
        return cls(**parts)

    @property
    def kl(self) -> float:
        """The mean over the questions."""
        return statistics.fmean(self.first)


def summarise_eighths(prompts: Sequence[PromptAnswers]) -> list[float]:
    """Return the mean KL of the questions about each part of the prompts that has any."""
    by_eighth: dict[int, list[float]] = {}
    for prompt in prompts:
        for eighth, kl in zip(prompt.eighths, prompt.first, strict=True):
            by_eighth.setdefault(eighth, []).append(kl)
    return [statistics.fmean(by_eighth[eighth]) for eighth in sorted(by_eighth)]


def measure_answers(
    prover: Prover, prompts: Sequence[Prompt], sources: Sequence[ConfigSource], noise: bool = False
) -> list[list[PromptAnswers]]:
    """Measure what profiles or candidates do to the answers about prompts of one length.

    Args:
        prover: its executor tells whether the model is whole on the device, and the answers are its own.
        prompts: of one length, at least one.
        sources: what is compared with the dense model.
        noise: measure dense attention by another kernel too, as the last of the variants. On a CPU there is none.

    Returns:
        For each variant the KLs of every prompt.

    Raises:
        ModelError: the model gave inf or NaN.
        ResourceError: The GPU's memory ran out.
    """
    executor, length = prover.executor, prompts[0].length
    executor.register_prompts(prompts)
    histories = []
    for source in sources:
        history = LayerHistory()
        for layer in range(executor.geometry.layers):
            history = history.append(LayerConfigAt.from_source(source, None, layer, length))
        histories.append(history)
    # where weights are read layer by layer, prompts move through each together
    parts = [[prompt] for prompt in prompts] if executor.resident else split_among_workers(executor, prompts)
    hashes = [tuple(prompt.sha256 for prompt in part) for part in parts]
    items = [AnswersItem(length, part, tuple(histories), noise, executor.resident) for part in hashes]
    by_prompt = chain.from_iterable(measure_items(items, executor, prover.journal))
    return [list(map(PromptAnswers.from_json, variant)) for variant in zip(*by_prompt, strict=True)]


@dataclass(frozen=True)
class AnswersItem(ProofItem):
    """The answers to some prompts' questions by variants of the model, as an item of work.

    own: ask for the dense model's own answers; else the documents' are read, layer by layer. Its result is, of each
    prompt, for each of `variants` and then for the noise, what `PromptAnswers` has.
    """

    prompts: tuple[str, ...]
    variants: tuple[LayerHistory, ...]
    noise: bool
    own: bool
    stage: str = field(default="answers", kw_only=True)

    @property
    def affinity(self) -> Hashable:
        return self.prompts

    @property
    def inputs(self) -> dict[str, Any]:
        runs = [variant.digest for variant in self.variants] + [NOISE] * self.noise
        return {"prompts": list(self.prompts), "runs": runs, "own": self.own}

    def __str__(self) -> str:
        return f"answers behind {pluralize(len(self.prompts), 'prompt')} of {self.length} tokens"

    @torch.no_grad()
    def run(self, worker: WorkerState) -> list[list[dict[str, Any]]]:
        self.use_s2o(worker)
        loaded, prompts = worker.loaded, [worker.prompts[prompt] for prompt in self.prompts]
        patches: list[Patch] = [partial(patch_layers, loaded, history) for history in self.variants]
        patches += [partial(use_sdpa_backend, SDPBackend.FLASH_ATTENTION)] * self.noise
        with self.within_memory(worker, "answering questions"):
            if not self.own:
                return [list(map(asdict, answers)) for answers in read_by_layer(worker, prompts, patches)]
            with loaded.weights.put_on_device(loaded.model):
                (prompt,) = prompts
                dense = answer_densely(loaded, prompt)
                return [[asdict(compare_answers(loaded, prompt, dense, patch)) for patch in patches]]


@dataclass(frozen=True)
class Turns:
    """Questions about a prompt with answers, each followed by the next question with its own.

    ids: int64 [turns, T]. rows: those before the answers' tokens, as many of the first question as of the second.
    eighths: the part of the prompt that each first question is about.
    """

    ids: Tensor
    rows: list[int]
    eighths: tuple[int, ...]

    @classmethod
    def from_answered(cls, questions: Sequence[Question], answered: Sequence[list[int]]) -> Turns:
        """Join questions, of which `answered` has the tokens with those of the answers."""
        ids = [first + second for first, second in zip(answered, answered[1:] + answered[:1], strict=True)]
        asked, length = len(questions[0].ids), len(answered[0])
        rows = [*range(asked - 1, length - 1), *range(length + asked - 1, 2 * length - 1)]
        return cls(torch.tensor(ids), rows, tuple(question.eighth for question in questions))


@dataclass(frozen=True)
class DenseAnswers:
    """The dense model's answers: to questions behind a prompt, and the needles that it finds at the prompt's end.

    log_probs: at the rows of the turns, float32 [turns, R, V]. needles: of each one its rows among the prompt's last
    ones, its tokens int64 [T] and their log-probability in nats.
    """

    turns: Turns
    log_probs: Tensor
    needles: list[tuple[slice, Tensor, float]]

    @classmethod
    def from_log_probs(cls, prompt: Prompt, turns: Turns, last: Tensor, log_probs: Tensor) -> DenseAnswers:
        """Find the needles in the log-probabilities of a prompt's `last` rows (`count_needle_rows`), [R, V]."""
        needles, before = [], prompt.length - len(last)
        for first, end in prompt.answers:  # the row before each token predicts it
            span, needle = slice(first - 1 - before, end - 1 - before), prompt.ids[first:end].to(last.device)
            if last[span].argmax(-1).equal(needle):
                needles.append((span, needle, _sum_log_probs(last[span], needle)))
        return cls(turns, log_probs, needles)

    def compare(self, last: Tensor, log_probs: Tensor) -> PromptAnswers:
        """Compare with these answers those of another model, of which there are the same rows."""
        kl, tokens = compare_log_probs(self.log_probs, log_probs).kl, len(self.turns.rows) // 2
        kept = sum(
            last[rows].argmax(-1).equal(needle) or log_prob - _sum_log_probs(last[rows], needle) < KEPT_WITHIN
            for rows, needle, log_prob in self.needles
        )
        first, second = (tuple(part.mean(1).tolist()) for part in (kl[:, :tokens], kl[:, tokens:]))
        return PromptAnswers(first, second, self.turns.eighths, len(self.needles), kept)


def answer_densely(loaded: LoadedModel, prompt: Prompt) -> DenseAnswers:
    """Let the dense model answer, each question by itself and then the next one behind it."""
    cache, last = prefill(loaded, prompt)
    questions = ask_about(loaded.tokenizer, prompt.ids.tolist())
    turns = Turns.from_answered(questions, revise_answers(loaded, cache, questions))
    return DenseAnswers.from_log_probs(prompt, turns, last, follow(loaded, cache, turns.ids, turns.rows))


def revise_answers(loaded: LoadedModel, cache: Any, questions: Sequence[Question]) -> list[list[int]]:
    """Return each question with what the model itself answers: the document's answer, revised by the model.

    Every pass replaces all tokens of the answers by the most likely ones, which makes at least one more of them final,
    so an answer that the document has nearly right takes two or three passes where generation takes one for each token.
    After `MAX_REVISIONS` passes the answers are taken as they are.
    """
    asked, answers = len(questions[0].ids), [question.answer for question in questions]
    rows = range(asked - 1, asked + len(answers[0]) - 1)
    for _ in range(MAX_REVISIONS):
        turns = torch.tensor([question.ids + answer for question, answer in zip(questions, answers, strict=True)])
        likely: list[list[int]] = follow(loaded, cache, turns, rows).argmax(-1).tolist()
        if likely == answers:
            break
        answers = likely
    return [question.ids + answer for question, answer in zip(questions, answers, strict=True)]


def compare_answers(loaded: LoadedModel, prompt: Prompt, dense: DenseAnswers, patch: Patch) -> PromptAnswers:
    """Compare the answers of a model that is patched during the prefill only."""
    with patch():
        cache, last = prefill(loaded, prompt)
    return dense.compare(last, follow(loaded, cache, dense.turns.ids, dense.turns.rows))


def prefill(loaded: LoadedModel, prompt: Prompt) -> tuple[Any, Tensor]:
    """Return the cache behind a prompt, and the log-probabilities of its last rows (`count_needle_rows`), [R, V]."""
    ids = prompt.ids[None].to(loaded.weights.device)
    outputs = loaded.model(input_ids=ids, use_cache=True, logits_to_keep=count_needle_rows(prompt))
    return outputs.past_key_values, outputs.logits[0].float().log_softmax(-1)


def count_needle_rows(prompt: Prompt) -> int:
    """Return the rows from the one before a prompt's first needle on; 1 where it asks for none."""
    return prompt.length + 1 - min((first for first, _ in prompt.answers), default=prompt.length)


def _sum_log_probs(log_probs: Tensor, tokens: Tensor) -> float:
    return float(log_probs.gather(1, tokens[:, None]).double().sum())


def follow(loaded: LoadedModel, cache: Any, turns: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the log-probabilities at some rows of turns, int64 [turns, T], behind a cache, which stays as it is.

    The result is float32 [turns, rows, V].
    """
    pieces = []
    for ids, copied in copy_cache(cache, turns.to(loaded.weights.device)):
        logits = loaded.model(input_ids=ids, past_key_values=copied, use_cache=True).logits
        pieces.append(logits[:, rows].float().log_softmax(-1))
    return torch.cat(pieces)


def copy_cache(cache: Any, turns: Tensor) -> Iterator[tuple[Tensor, Any]]:
    """Yield turns [turns, ...] in parts, each with a copy of the cache for it; copies are within `CACHE_BYTES`."""
    at_once = 1
    if all(hasattr(layer, "batch_repeat_interleave") for layer in cache.layers):  # one of linear attention lacks it
        held = sum(kept.nbytes for layer in cache.layers for kept in (layer.keys, layer.values) if kept is not None)
        at_once = max(1, CACHE_BYTES // max(held, 1))
    for part in turns.split(at_once):
        copied = copy.deepcopy(cache)
        if len(part) > 1:
            copied.batch_repeat_interleave(len(part))
        yield part, copied


def read_by_layer(
    worker: WorkerState, prompts: Sequence[Prompt], patches: Sequence[Patch]
) -> list[list[PromptAnswers]]:
    """Compare the documents' own answers behind patched and dense prefills, with one layer at a time on the device.

    A prompt's keys and values are there only until its turns have followed it through the layer.
    """
    loaded, ways = worker.loaded, [nullcontext, *patches]
    turns = [quote_answers(loaded, prompt) for prompt in prompts]
    caches: list[DynamicCache] = []

    def read(patch: Patch, layer: DecoderLayer, prompt: Stream) -> Stream:
        caches.append(DynamicCache(config=loaded.model.config))
        with patch():
            moved = layer.dense(replace(prompt, cache=caches[-1]))
        if layer.attention is not None and caches[-1].get_seq_length(layer.number) != prompts[0].length:
            raise ModelError(
                f"layer {layer.number} keeps its keys and values elsewhere than in transformers' cache: use "
                "--budget-rel-mse 1e-3, for which no answers are read"
            )
        return replace(moved, cache=None)

    def answer(layer: DecoderLayer, asked: Stream) -> Stream:
        parts = copy_cache(caches.pop(), asked.hidden)
        pieces = [layer.dense(replace(asked, hidden=part, cache=copied)).hidden for part, copied in parts]
        return replace(asked, hidden=torch.cat(pieces))

    forward = LayerwiseForward(loaded, _begin_reading(worker, prompts, turns, len(ways)))
    through = [run for _ in prompts for way in ways for run in (partial(read, way), answer)]
    while forward.number < len(forward.layers):
        forward.move(through)
    pairs, results = zip(forward.streams[::2], forward.streams[1::2], strict=True), []
    with put_logits_on_device(loaded) as logits:

        def predict(hidden: Tensor) -> Tensor:
            return logits(hidden.flatten(0, 1)[None])[0].float().log_softmax(-1).unflatten(0, hidden.shape[:2])

        for prompt, asked in zip(prompts, turns, strict=True):
            rows = -count_needle_rows(prompt)
            outputs = (
                (predict(text.hidden[:, rows:])[0], predict(answers.hidden[:, asked.rows]))
                for text, answers in islice(pairs, len(ways))
            )
            dense = DenseAnswers.from_log_probs(prompt, asked, *next(outputs))
            results.append([dense.compare(*output) for output in outputs])
    return results


def quote_answers(loaded: LoadedModel, prompt: Prompt) -> Turns:
    """Return the questions about a prompt with the answers that its own text gives."""
    questions = ask_about(loaded.tokenizer, prompt.ids.tolist())
    return Turns.from_answered(questions, [question.ids + question.answer for question in questions])


def _begin_reading(worker: WorkerState, prompts: Sequence[Prompt], turns: Sequence[Turns], ways: int) -> list[Stream]:
    """Embed each prompt, and its turns as one stream behind it, so many times."""
    calls: dict[int, Calls] = {}
    streams = []
    texts = begin(worker.loaded, [prompt.ids for prompt in prompts], worker.cached("calls of patched layers", dict))
    for text, asked in zip(texts, turns, strict=True):
        each = begin(worker.loaded, list(asked.ids), calls, prompts[0].length)
        batch = replace(text, hidden=torch.cat([turn.hidden for turn in each]), calls=each[0].calls)
        streams += [text, batch] * ways
    return streams


@contextmanager
def patch_layers(loaded: LoadedModel, history: LayerHistory) -> Iterator[None]:
    """Let every layer of full attention run its configuration inside the block."""
    layers = [(layer, layer.attention) for layer in list_decoder_layers(loaded.model) if layer.attention is not None]
    try:
        for (layer, attention), config in zip(layers, history.configs, strict=True):
            hf.attach(attention, make_layer_state(layer, config))
        yield
    finally:
        for _, attention in layers:
            hf.detach(attention)
