"""KL(dense || patched) at the rows that answer, behind a finished prefill.

The patched model prefills a prompt once. Each question (`prompts.questions`) is then a turn of its own behind that
cache, and a further question a second turn behind it. A turn's own rows are dense, as they are where few queries stand
behind a long prefix, so what differs is what the prefill left in the cache. Answers are the dense model's own, or the
document's, revised towards them.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from calibrate.model.layers import list_decoder_layers
from calibrate.model.logits import compare_log_probs
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
from calibrate.work.executor import WorkerState, measure_items
from s2o_runtime.errors import ResourceError
from s2o_runtime.huggingface import hf
from s2o_runtime.reference.dense import use_sdpa_backend

NOISE = "noise"  # the variant that is dense attention by another kernel
CACHE_BYTES = 16 << 30  # that copies of a prompt's cache may have, for turns that run at once
MAX_REVISIONS = 4  # of a guessed answer, until the dense model would give each of its tokens


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
        prover: its executor holds the whole model; in its chunks the variants prefill.
        prompts: of one length, at least one.
        sources: what is compared with the dense model.
        noise: measure dense attention by another kernel too, as the last of the variants. On a CPU there is none.

    Returns:
        For each variant the KLs of every prompt.

    Raises:
        ModelError: the model gave inf or NaN.
        ResourceError: The GPU's memory ran out.
    """
    length, layers = prompts[0].length, range(prover.executor.geometry.layers)
    prover.executor.register_prompts(prompts)
    histories = []
    for source in sources:
        history = LayerHistory()
        for layer in layers:
            history = history.append(LayerConfigAt.from_source(source, prover.chunk, layer, length))
        histories.append(history)
    items = [AnswersItem(length, prompt.sha256, tuple(histories), noise) for prompt in prompts]
    results = measure_items(items, prover.executor, prover.journal)
    return [[PromptAnswers.from_json(result[variant]) for result in results] for variant in range(len(results[0]))]


@dataclass(frozen=True)
class AnswersItem(ProofItem):
    """The answers to one prompt's questions by variants of the model, as an item of work.

    Its result is, for each of `variants` and then for the noise, what `PromptAnswers` has.
    """

    prompt: str
    variants: tuple[LayerHistory, ...]
    noise: bool = False
    stage: str = field(default="answers", kw_only=True)

    @property
    def affinity(self) -> Hashable:
        return self.prompt

    @property
    def inputs(self) -> dict[str, Any]:
        runs = [variant.digest for variant in self.variants] + [NOISE] * self.noise
        return {"prompt": self.prompt, "runs": runs}

    def __str__(self) -> str:
        return f"answers behind a prompt of {self.length} tokens"

    @torch.no_grad()
    def run(self, worker: WorkerState) -> list[dict[str, Any]]:
        self.use_s2o(worker)
        loaded, prompt = worker.loaded, worker.prompts[self.prompt]
        if not loaded.weights.resident:
            raise ResourceError(
                f"the weights of {loaded.name} do not fit on {loaded.weights.device} as a whole, which answers are "
                "measured with: use --budget-rel-mse 1e-3, which reads them layer by layer"
            )
        with self.within_memory(worker, "answering questions"), loaded.weights.put_on_device(loaded.model):
            dense = answer_densely(loaded, prompt)
            return [
                asdict(compare_answers(loaded, prompt, dense, patch))
                for patch in (
                    *(lambda history=history: patch_layers(loaded, history) for history in self.variants),
                    *[lambda: use_sdpa_backend(SDPBackend.FLASH_ATTENTION)] * self.noise,
                )
            ]


@dataclass(frozen=True)
class DenseAnswers:
    """The dense model's answers: to questions behind a prompt, and the needles that it finds at the prompt's end.

    turns: the tokens of each question with its answer, and of the next one with its own, as many in each. rows: those
    before each answer's tokens, the first's and the second's. log_probs: at these rows, float32 [turns, R, V]. eighths:
    the part of the prompt that each first question is about. needles: of each one its rows among the prompt's last
    ones, its tokens int64 [T] and their log-probability in nats.
    """

    turns: list[list[int]]
    rows: tuple[range, range]
    log_probs: Tensor
    eighths: tuple[int, ...]
    needles: list[tuple[slice, Tensor, float]]


def answer_densely(loaded: LoadedModel, prompt: Prompt) -> DenseAnswers:
    """Let the dense model answer, each question by itself and then the next one behind it."""
    cache, last = prefill(loaded, prompt)
    questions = ask_about(loaded.tokenizer, prompt.ids.tolist())
    answered = revise_answers(loaded, cache, questions)
    turns = [first + second for first, second in zip(answered, answered[1:] + answered[:1], strict=True)]
    asked, length = len(questions[0].ids), len(answered[0])
    rows = range(asked - 1, length - 1), range(length + asked - 1, 2 * length - 1)
    needles, before = [], prompt.length - len(last)
    for first, end in prompt.answers:  # the row before each token predicts it
        span, needle = slice(first - 1 - before, end - 1 - before), prompt.ids[first:end].to(last.device)
        if last[span].argmax(-1).equal(needle):
            needles.append((span, needle, _sum_log_probs(last[span], needle)))
    log_probs = follow(loaded, cache, turns, [*rows[0], *rows[1]])
    return DenseAnswers(turns, rows, log_probs, tuple(question.eighth for question in questions), needles)


def revise_answers(loaded: LoadedModel, cache: Any, questions: Sequence[Question]) -> list[list[int]]:
    """Return each question with what the model itself answers: the document's answer, revised by the model.

    Every pass replaces all tokens of the answers by the most likely ones, which makes at least one more of them final,
    so an answer that the document has nearly right takes two or three passes where generation takes one for each token.
    After `MAX_REVISIONS` passes the answers are taken as they are.
    """
    asked, answers = len(questions[0].ids), [question.answer for question in questions]
    rows = range(asked - 1, asked + len(answers[0]) - 1)
    for _ in range(MAX_REVISIONS):
        turns = [question.ids + answer for question, answer in zip(questions, answers, strict=True)]
        likely: list[list[int]] = follow(loaded, cache, turns, rows).argmax(-1).tolist()
        if likely == answers:
            break
        answers = likely
    return [question.ids + answer for question, answer in zip(questions, answers, strict=True)]


def compare_answers(
    loaded: LoadedModel, prompt: Prompt, dense: DenseAnswers, patch: Callable[[], AbstractContextManager[None]]
) -> PromptAnswers:
    """Compare the answers of a model that is patched during the prefill only."""
    with patch():
        cache, last = prefill(loaded, prompt)
    log_probs = follow(loaded, cache, dense.turns, [*dense.rows[0], *dense.rows[1]])
    kl, tokens = compare_log_probs(dense.log_probs, log_probs).kl, len(dense.rows[0])
    kept = sum(
        last[rows].argmax(-1).equal(tokens) or log_prob - _sum_log_probs(last[rows], tokens) < KEPT_WITHIN
        for rows, tokens, log_prob in dense.needles
    )
    first, second = (tuple(part.mean(1).tolist()) for part in (kl[:, :tokens], kl[:, tokens:]))
    return PromptAnswers(first, second, dense.eighths, len(dense.needles), kept)


def prefill(loaded: LoadedModel, prompt: Prompt) -> tuple[Any, Tensor]:
    """Return the cache behind a prompt, and the log-probabilities from the row before its first needle on.

    The latter are float32 [R, V], of the last row alone where the prompt asks for no needle.
    """
    ids = prompt.ids[None].to(loaded.weights.device)
    rows = prompt.length + 1 - min((first for first, _ in prompt.answers), default=prompt.length)
    outputs = loaded.model(input_ids=ids, use_cache=True, logits_to_keep=rows)
    return outputs.past_key_values, outputs.logits[0].float().log_softmax(-1)


def _sum_log_probs(log_probs: Tensor, tokens: Tensor) -> float:
    return float(log_probs.gather(1, tokens[:, None]).double().sum())


def follow(loaded: LoadedModel, cache: Any, turns: Sequence[Sequence[int]], rows: Sequence[int]) -> Tensor:
    """Return the log-probabilities at some rows of turns of one length behind a cache, which stays as it is.

    As many turns run at once as have caches within `CACHE_BYTES`. The result is float32 [turns, rows, V].
    """
    at_once, pieces = 1, []
    if all(hasattr(layer, "batch_repeat_interleave") for layer in cache.layers):  # one of linear attention lacks it
        held = sum(kept.nbytes for layer in cache.layers for kept in (layer.keys, layer.values) if kept is not None)
        at_once = max(1, CACHE_BYTES // max(held, 1))
    for first in range(0, len(turns), at_once):
        ids = torch.tensor(turns[first : first + at_once], device=loaded.weights.device)
        copied = copy.deepcopy(cache)
        if len(ids) > 1:
            copied.batch_repeat_interleave(len(ids))
        logits = loaded.model(input_ids=ids, past_key_values=copied, use_cache=True).logits
        pieces.append(logits[:, rows].float().log_softmax(-1))
    return torch.cat(pieces)


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
