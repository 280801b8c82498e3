"""Scores of one model on one prompt: a forward pass, logits only where they are needed, an answer from the cache."""

from __future__ import annotations

import copy
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, islice, pairwise
from operator import eq
from typing import Any

import torch
from torch import Tensor

from calibrate.evaluation.ruler import RulerQuestion
from calibrate.model import logits
from calibrate.model.layers import get_decoder
from calibrate.model.logits import ROWS, get_logits, time_prefill
from calibrate.model.models import LoadedModel
from calibrate.prompts.prompt import Prompt
from s2o_runtime.errors import ModelError

BUCKETS = 8  # equal parts of a prompt, by position
POSITIONS = 512  # of a prompt at which predictions are compared with the dense model's


class ForwardPass:
    """One prompt through a model as it is patched now.

    ids: [L]. hidden: [L, H], after the last norm. cache: its keys and values, if they are kept.
    """

    @torch.no_grad()
    def __init__(self, loaded: LoadedModel, ids: Tensor, *, cache: bool = False) -> None:
        self._logits = get_logits(loaded.model)
        self._decoder = get_decoder(loaded.model)
        self.ids = ids.to(loaded.weights.device)
        outputs = self._decoder(input_ids=self.ids[None], use_cache=cache)
        self.hidden: Tensor = outputs.last_hidden_state[0]
        self.cache: Any = outputs.past_key_values if cache else None

    @torch.no_grad()
    def read_on(self, tokens: Sequence[int]) -> Tensor:
        """Return the log-probabilities behind the prompt and behind each of some tokens T after it, float32 [T + 1, V].

        The cache stays as it is.
        """
        hidden = self.hidden[-1:]
        if tokens:
            ids, cache = torch.tensor([list(tokens)], device=self.ids.device), copy.deepcopy(self.cache)
            outputs = self._decoder(input_ids=ids, past_key_values=cache, use_cache=True)
            hidden = torch.cat([hidden, outputs.last_hidden_state[0]])
        return self._logits(hidden[None])[0].float().log_softmax(-1)

    @torch.no_grad()
    def write_on(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield the tokens that the model writes greedily behind the prompt and some tokens T >= 1, without end."""
        cache = copy.deepcopy(self.cache)
        while True:
            ids = torch.tensor([list(tokens)], device=self.ids.device)
            outputs = self._decoder(input_ids=ids, past_key_values=cache, use_cache=True)
            tokens = [int(self._logits(outputs.last_hidden_state[:, -1:]).argmax())]
            yield tokens[0]

    def log_probs(self, positions: Tensor) -> Iterator[Tensor]:
        """Yield the log-probabilities of the token after each of these positions [R], float32 [r, V] at a time.

        Raises ModelError if one is not finite. r is at most `ROWS`, so that few logits exist at once.
        """
        for rows in torch.split(positions.to(self.hidden.device), ROWS):
            with torch.no_grad():
                log_probs = self._logits(self.hidden[rows][None])[0].float().log_softmax(-1)
            if not bool(log_probs.amin(-1).isfinite().all()):
                raise ModelError(
                    f"the predictions for a prompt of {len(self.ids)} tokens hold inf or NaN, expected finite numbers: "
                    "check that the model's weights are whole and meant for this type"
                )
            yield log_probs


def score_answers(forward: ForwardPass, prompt: Prompt) -> dict[str, Any]:
    """Return for each answer whether all of its tokens are the most likely ones, and the share of such answers.

    log_likelihood: in nats, of all `answer_tokens` tokens.
    """
    positions = torch.cat([torch.arange(first, last) for first, last in prompt.answers])
    all_tokens = torch.split(forward.ids[positions.to(forward.ids.device)], ROWS)
    log_likelihood, right = 0.0, []
    for tokens, log_probs in zip(all_tokens, forward.log_probs(positions - 1), strict=True):
        log_likelihood += float(log_probs.gather(-1, tokens[:, None]).double().sum())
        right += (log_probs.argmax(-1) == tokens).tolist()
    ends = list(accumulate(last - first for first, last in prompt.answers))
    correct = [all(right[first:end]) for first, end in pairwise([0, *ends])]
    score = statistics.fmean(correct)
    return {"score": score, "correct": correct, "log_likelihood": log_likelihood, "answer_tokens": len(positions)}


def score_ruler(
    loaded: LoadedModel, forward: ForwardPass, question: RulerQuestion, draft: Sequence[int]
) -> dict[str, Any]:
    """Score what a model writes greedily behind a prompt by RULER's metric, and the right answer's log-likelihood.

    draft: tokens that it may write, read all at once: those up to the first that it would not write need no pass each.
    log_likelihood: in nats, of `answer_tokens` tokens.
    """
    answer = question.answer
    log_likelihood = float(forward.read_on(answer[:-1])[range(len(answer)), answer].double().sum())
    end = getattr(loaded.model.generation_config, "eos_token_id", None)
    ends = {end} if isinstance(end, int) else set(end or ())
    draft = draft[: question.most - 1]
    likely = forward.read_on(draft).argmax(-1).tolist()
    known = likely[: [*map(eq, draft, likely), False].index(False) + 1]
    written = []
    for token in islice(chain(known, forward.write_on(known)), question.most):
        written.append(token)
        text = loaded.tokenizer.decode(written, skip_special_tokens=True)
        score = question.score(text)
        # the metric looks for words anywhere in the text: once all are there, what follows cannot change it
        if score == 1 or token in ends:
            break
    return {"score": score, "text": text, "log_likelihood": log_likelihood, "answer_tokens": len(answer)}


def sample_positions(length: int, rng: random.Random) -> Tensor:
    """Draw the positions [R] at which predictions are compared, equally many of each of `BUCKETS` parts."""
    edges = [math.ceil(part * length / BUCKETS) for part in range(BUCKETS + 1)]
    parts = [range(first, end) for first, end in pairwise(edges)]
    return torch.tensor(sorted(chain(*(rng.sample(part, min(len(part), POSITIONS // BUCKETS)) for part in parts))))


def compare_predictions(forward: ForwardPass, positions: Tensor, dense: Tensor) -> dict[str, Any]:
    """Sum KL(dense || this) in nats, and count equal most likely tokens, for each part of the prompt.

    dense: [R, V], the dense model's `log_probs` at these positions [R].
    """
    pairs = zip(forward.log_probs(positions), torch.split(dense, ROWS), strict=True)
    agreements = [logits.compare_log_probs(rows.to(log_probs.device), log_probs) for log_probs, rows in pairs]
    values = {name: torch.cat([getattr(rows, name).cpu() for rows in agreements]) for name in ("kl", "same")}
    values["positions"] = torch.ones(len(positions))
    parts = positions * BUCKETS // len(forward.ids)
    return {name: torch.bincount(parts, value.double(), BUCKETS).tolist() for name, value in values.items()}


def time_first_token(loaded: LoadedModel, ids: Tensor, repeats: int) -> dict[str, Any]:
    """Time `repeats` prefills of a prompt [L], after one that is not timed, as the model is patched now.

    Seconds go until the first token is known and the cache is written. peak_bytes: the most GPU memory in use in the
    last prefill, weights included; None on a CPU.
    """
    device = loaded.weights.device
    on_gpu = device.type == "cuda"
    seconds = []
    for _ in range(repeats + 1):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        seconds.append(time_prefill(loaded.model, ids, use_cache=True))
    del seconds[0]
    return {
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
    }
