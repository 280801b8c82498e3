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
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from transformers import DynamicCache

from calibrate.model.estimate import has_plenty_of_memory, measure_free_memory
from calibrate.model.layers import (
    Calls,
    DecoderLayer,
    Stream,
    begin,
    list_decoder_layers,
    put_layer_on_device,
    run_in_pieces,
)
from calibrate.model.logits import Logits, compare_log_probs, put_logits_on_device
from calibrate.model.models import LoadedModel
from calibrate.progress import show_progress
from calibrate.prompts.prompt import Prompt
from calibrate.prompts.questions import EIGHTHS, Question, ask_about
from calibrate.proof.layers import (
    KEPT_WITHIN,
    ConfigSource,
    LayerConfigAt,
    LayerHistory,
    ProofItem,
    list_compared_rows,
    make_layer_state,
)
from calibrate.proof.verify import Prover
from calibrate.work.executor import WorkerState, measure_items, split_among_workers
from s2o_runtime.errors import ModelError
from s2o_runtime.fields import pluralize
from s2o_runtime.huggingface import hf
from s2o_runtime.reference.dense import use_sdpa_backend

NOISE = "noise"  # the variant that is dense attention by another kernel
CACHE_BYTES = 32 << 30  # of copies of a prompt's cache for turns that run at once, where half of the memory holds them
KEPT_BYTES = 16 << 30  # of dense answers that a worker keeps: 0.6 GB a prompt with 150000 words
MAX_REVISIONS = 4  # of a guessed answer, until the dense model would give each of its tokens
Patch = Callable[[], AbstractContextManager[None]]  # inside the block a prefill is another variant's


@dataclass(frozen=True)
class PromptAnswers:
    """The answers to one prompt's questions by one variant of the model, beside the dense model's.

    first: the mean KL of each question's answer, in nats per token; they are about the parts of the prompt in order.
    second: of the next question's, asked behind it. found: the needles that the prompt itself asks for and the dense
    model finds. kept: those of them that this variant finds too, or nearly (`layers.KEPT_WITHIN`).
    """

    first: tuple[float, ...]
    second: tuple[float, ...]
    found: int
    kept: int

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PromptAnswers:
        """Return the answers that an item of work or a journal has as JSON."""
        return cls(tuple(value["first"]), tuple(value["second"]), value["found"], value["kept"])

    @property
    def kl(self) -> float:
        """The mean over the questions."""
        return statistics.fmean(self.first)


def find_worst_eighth(prompts: Sequence[PromptAnswers]) -> float:
    """Return the largest mean KL of the questions about one eighth of prompts of one length."""
    kls = torch.tensor([prompt.first for prompt in prompts], dtype=torch.float64)
    return max(part.mean().item() for part in kls.tensor_split(min(EIGHTHS, kls.shape[1]), 1))


def measure_answers(
    prover: Prover, prompts: Sequence[Prompt], sources: Sequence[ConfigSource], noise: bool = False
) -> list[list[PromptAnswers]]:
    """Measure what profiles or candidates do to the answers about prompts of one length.

    Args:
        prover: its executor tells whether the model is whole on the device, and the answers are its own; in its chunks
            the variants prefill.
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
            history = history.append(LayerConfigAt.from_source(source, prover.chunk, layer, length))
        histories.append(history)
    # where weights are read layer by layer, prompts move through each together
    parts = [[prompt] for prompt in prompts] if executor.resident else split_among_workers(executor, prompts)
    hashes = [tuple(prompt.sha256 for prompt in part) for part in parts]
    items = [AnswersItem(length, part, tuple(histories), noise, executor.resident) for part in hashes]
    title = f"answers about {length} tokens"
    with show_progress(title, len(items), "prompt", shown=prover.progress, part=True) as step:
        by_prompt = chain.from_iterable(measure_items(items, executor, prover.journal, step))
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
            modules = [layer.module for layer in list_decoder_layers(loaded.model)]
            with loaded.weights.put_on_device(loaded.model), run_in_pieces(modules):
                (prompt,) = prompts
                dense = keep_dense_answers(worker, prompt)
                return [[asdict(compare_answers(loaded, prompt, dense, patch)) for patch in patches]]


@dataclass(frozen=True)
class Turns:
    """Questions about a prompt with answers, each followed by the next question with its own.

    ids: int64 [turns, T]. rows: those before the answers' tokens, as many of the first question as of the second.
    """

    ids: Tensor
    rows: list[int]

    @classmethod
    def from_questions(cls, questions: Sequence[Question]) -> Turns:
        """Join questions and their answers."""
        answered = [question.ids + question.answer for question in questions]
        ids = [first + second for first, second in zip(answered, answered[1:] + answered[:1], strict=True)]
        asked, length = len(questions[0].ids), len(answered[0])
        rows = [*range(asked - 1, length - 1), *range(length + asked - 1, 2 * length - 1)]
        return cls(torch.tensor(ids), rows)


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
        kl, tokens = compare_log_probs(self.log_probs.to(log_probs.device), log_probs).kl, len(self.turns.rows) // 2
        kept = sum(
            last[rows].argmax(-1).equal(needle) or log_prob - _sum_log_probs(last[rows], needle) < KEPT_WITHIN
            for rows, needle, log_prob in self.needles
        )
        first, second = (tuple(part.mean(1).tolist()) for part in (kl[:, :tokens], kl[:, tokens:]))
        return PromptAnswers(first, second, len(self.needles), kept)


def keep_dense_answers(worker: WorkerState, prompt: Prompt) -> DenseAnswers:
    """Return the dense model's answers, which the worker keeps for other variants, and for the proof what it reads."""
    known, states, name = worker.dense["answers"], worker.dense["hidden states"], prompt.sha256

    def keep_states(layer: torch.nn.Module, inputs: Any, output: Any) -> None:
        if name not in states:  # later passes are of turns
            hidden = output[0] if isinstance(output, tuple) else output
            states[name] = hidden[:, list_compared_rows(prompt).to(hidden.device)].cpu()

    dense: DenseAnswers | None = known.pop(name, None)
    if dense is None:
        hook = list_decoder_layers(worker.loaded.model)[-1].module.register_forward_hook(keep_states)
        try:
            dense = answer_densely(worker.loaded, prompt)
        finally:
            hook.remove()
    known[name] = dense  # the last one now
    while len(known) > 1 and sum(kept.log_probs.nbytes for kept in known.values()) > KEPT_BYTES:
        del known[next(iter(known))]
    return dense


def answer_densely(loaded: LoadedModel, prompt: Prompt) -> DenseAnswers:
    """Let the dense model answer, each question by itself and then the next one behind it.

    The result is in the host's memory, or where the GPU's is plenty in that, which spares copying it for each variant.
    """
    cache, last = prefill(loaded, prompt)
    questions = ask_about(loaded.tokenizer, prompt.ids.tolist())
    turns = Turns.from_questions(revise_answers(loaded, cache, questions))
    log_probs = follow(loaded, cache, turns.ids, turns.rows)
    kept = log_probs if has_plenty_of_memory(log_probs.device) else log_probs.cpu()
    return DenseAnswers.from_log_probs(prompt, turns, last, kept)


def revise_answers(loaded: LoadedModel, cache: Any, questions: Sequence[Question]) -> Sequence[Question]:
    """Return the questions with what the model itself answers: the document's answer, revised by the model.

    Every pass replaces all tokens of the answers by the most likely ones, which makes at least one more of them final,
    so an answer that the document has nearly right takes two or three passes where generation takes one for each token.
    After `MAX_REVISIONS` passes the answers are taken as they are.
    """
    asked = len(questions[0].ids)
    rows = range(asked - 1, asked + len(questions[0].answer) - 1)
    for _ in range(MAX_REVISIONS):
        turns = torch.tensor([question.ids + question.answer for question in questions])
        likely = follow(loaded, cache, turns, rows).argmax(-1).tolist()
        revised = [replace(question, answer=answer) for question, answer in zip(questions, likely, strict=True)]
        if revised == questions:
            break
        questions = revised
    return questions


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
    """Yield turns [turns, ...] in equal parts, each with a copy of the cache for it, within `CACHE_BYTES`."""
    at_once = 1
    if all(hasattr(layer, "batch_repeat_interleave") for layer in cache.layers):  # one of linear attention lacks it
        held = sum(kept.nbytes for layer in cache.layers for kept in (layer.keys, layer.values) if kept is not None)
        room = measure_free_memory(turns.device) // 2 if turns.is_cuda else CACHE_BYTES
        at_once = max(1, min(room, CACHE_BYTES) // max(held, 1))
    for part in turns.tensor_split(-(-len(turns) // at_once)):
        copied = copy.deepcopy(cache)
        if len(part) > 1:
            copied.batch_repeat_interleave(len(part))
        yield part, copied


def read_by_layer(worker: WorkerState, prompts: list[Prompt], patches: list[Patch]) -> list[list[PromptAnswers]]:
    """Compare the documents' own answers behind patched prefills with those behind the dense one, layer by layer."""
    loaded, texts = worker.loaded, [prompt.ids for prompt in prompts]
    turns = [Turns.from_questions(ask_about(loaded.tokenizer, text.tolist())) for text in texts]
    calls: dict[int, Calls] = {}
    begun = [begin(loaded, list(of_prompt.ids), calls, len(texts[0])) for of_prompt in turns]
    behind = [replace(first, hidden=torch.cat([turn.hidden for turn in (first, *others)])) for first, *others in begun]
    streams = zip(begin(loaded, texts, worker.cached("calls of patched layers", dict)), behind, strict=True)
    readings = [[Reading(patch, *pair) for patch in (nullcontext, *patches)] for pair in streams]
    for layer in list_decoder_layers(loaded.model):
        with put_layer_on_device(loaded, layer):
            for reading in chain.from_iterable(readings):
                reading.move(loaded, layer)
    results = []
    with put_logits_on_device(loaded) as logits:
        for prompt, of_prompt, by_variant in zip(prompts, turns, readings, strict=True):
            outputs = (reading.predict(logits, count_needle_rows(prompt), of_prompt.rows) for reading in by_variant)
            dense = DenseAnswers.from_log_probs(prompt, of_prompt, *next(outputs))
            results.append([dense.compare(*output) for output in outputs])
    return results


@dataclass
class Reading:
    """A prompt and its turns, [turns, T, H], on their way through one variant of a model, layer by layer."""

    patch: Patch
    text: Stream
    turns: Stream

    def move(self, loaded: LoadedModel, layer: DecoderLayer) -> None:
        """Run a layer, and keep what the prompt leaves in a cache until its turns have followed it."""
        cache = DynamicCache(config=loaded.model.config)
        with self.patch():
            self.text = layer.dense(self.text, cache)
        if layer.attention is not None and not cache.get_seq_length(layer.number):
            raise ModelError(f"layer {layer.number} keeps no keys in a cache, as answers need: use --budget-rel-mse")
        parts = copy_cache(cache, self.turns.hidden)
        pieces = [layer.dense(replace(self.turns, hidden=part), copied).hidden for part, copied in parts]
        self.turns = replace(self.turns, hidden=torch.cat(pieces))

    def predict(self, logits: Logits, last: int, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of so many last rows of the prompt, and those at some rows of the turns."""
        asked = self.turns.hidden[:, rows]
        both = torch.cat([self.text.hidden[0, -last:], asked.flatten(0, 1)])
        log_probs = logits(both[None])[0].float().log_softmax(-1)
        return log_probs[:last], log_probs[last:].reshape(*asked.shape[:2], -1)


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
