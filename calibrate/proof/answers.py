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
        prover: its executor holds the whole model.
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
            history = history.append(LayerConfigAt.from_source(source, None, layer, length))
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
class AnsweredTurn:
    """Two turns behind a prompt, with the answers that the dense model gives.

    ids: the tokens of both. rows: the rows before each token of the first answer, and of the second. log_probs: of the
    dense model at these rows, float32 [R, V] on the CPU.
    """

    ids: list[int]
    rows: tuple[slice, slice]
    eighth: int
    log_probs: Tensor


@dataclass(frozen=True)
class DenseAnswers:
    """The dense model's answers: to questions behind a prompt, and the needles that it finds at the prompt's end.

    needles: of each one its rows among the prompt's last ones, its tokens int64 [T] and their log-probability in nats.
    """

    turns: list[AnsweredTurn]
    needles: list[tuple[slice, Tensor, float]]


def answer_densely(loaded: LoadedModel, prompt: Prompt) -> DenseAnswers:
    """Let the dense model answer, each question by itself and then the next one behind it."""
    cache, last = prefill(loaded, prompt)
    questions = ask_about(loaded.tokenizer, prompt.ids.tolist())
    answers = [revise_answer(loaded, cache, question) for question in questions]
    turns = []
    for number, question in enumerate(questions):
        following = (number + 1) % len(questions)
        first_end = len(question.ids) + len(answers[number])
        second_begin = first_end + len(questions[following].ids)
        tokens = [*question.ids, *answers[number], *questions[following].ids, *answers[following]]
        rows = slice(len(question.ids) - 1, first_end - 1), slice(second_begin - 1, len(tokens) - 1)
        turns.append(AnsweredTurn(tokens, rows, question.eighth, read_log_probs(loaded, cache, tokens, rows).cpu()))
    needles, before = [], prompt.length - len(last)
    for first, end in prompt.answers:  # the row before each token predicts it
        span, needle = slice(first - 1 - before, end - 1 - before), prompt.ids[first:end].to(last.device)
        if last[span].argmax(-1).equal(needle):
            needles.append((span, needle, _sum_log_probs(last[span], needle)))
    return DenseAnswers(turns, needles)


def revise_answer(loaded: LoadedModel, cache: Any, question: Question) -> list[int]:
    """Return what the model itself answers: the document's answer, revised until each token is the most likely one.

    Every pass replaces all tokens by the most likely ones, which makes at least one more of them final, so an answer
    that the document has nearly right takes two or three passes where generation takes one for each token. After
    `MAX_REVISIONS` passes the answer is taken as it is.
    """
    answer = question.answer
    for _ in range(MAX_REVISIONS):
        logits = follow(loaded, cache, [*question.ids, *answer])
        likely = logits[len(question.ids) - 1 : -1].argmax(-1).tolist()
        if likely == answer:
            break
        answer = likely
    return answer


def compare_answers(
    loaded: LoadedModel, prompt: Prompt, dense: DenseAnswers, patch: Callable[[], AbstractContextManager[None]]
) -> PromptAnswers:
    """Compare the answers of a model that is patched during the prefill only."""
    with patch():
        cache, last = prefill(loaded, prompt)
    first, second = [], []
    for turn in dense.turns:
        log_probs = read_log_probs(loaded, cache, turn.ids, turn.rows)
        kl = compare_log_probs(turn.log_probs.to(log_probs.device), log_probs).kl
        tokens = turn.rows[0].stop - turn.rows[0].start
        first.append(float(kl[:tokens].mean()))
        second.append(float(kl[tokens:].mean()))
    kept = sum(
        last[rows].argmax(-1).equal(tokens) or log_prob - _sum_log_probs(last[rows], tokens) < KEPT_WITHIN
        for rows, tokens, log_prob in dense.needles
    )
    eighths = tuple(turn.eighth for turn in dense.turns)
    return PromptAnswers(tuple(first), tuple(second), eighths, len(dense.needles), kept)


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


def follow(loaded: LoadedModel, cache: Any, tokens: Sequence[int]) -> Tensor:
    """Return the logits float32 [T, V] of tokens behind a cache, which stays as it is."""
    ids = torch.tensor([tokens], device=loaded.weights.device)
    logits: Tensor = loaded.model(input_ids=ids, past_key_values=copy.deepcopy(cache), use_cache=True).logits
    return logits[0].float()


def read_log_probs(loaded: LoadedModel, cache: Any, tokens: Sequence[int], rows: Sequence[slice]) -> Tensor:
    """Return the log-probabilities at some rows of tokens behind a cache, float32 [R, V]."""
    logits = follow(loaded, cache, tokens)
    return torch.cat([logits[part] for part in rows]).log_softmax(-1)


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
