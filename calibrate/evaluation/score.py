"""Scores of one model on one prompt: a forward pass, logits only where they are needed, an answer from the cache."""

from __future__ import annotations

import copy
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
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
ANSWER = 64  # tokens of a greedy answer


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
    def predict(self, tokens: Sequence[int] = ()) -> list[int]:
        """Return the most likely token after the prompt; with tokens, after each of them behind the cache.

        Tokens are read by the model as it is patched now, and stay in the cache.
        """
        hidden = self._read(tokens) if tokens else self.hidden[-1:]
        most_likely: list[int] = self._logits(hidden[None])[0].argmax(-1).tolist()
        return most_likely

    @torch.no_grad()
    def score_answer(self, answer: Sequence[int]) -> float:
        """Return the log-likelihood in nats of an answer behind the cache; all but its last token stay there."""
        hidden = torch.cat([self.hidden[-1:], *([self._read(answer[:-1])] if answer[1:] else [])])
        log_probs = self._logits(hidden[None])[0].float().log_softmax(-1)
        return float(log_probs[range(len(answer)), answer].double().sum())

    def _read(self, tokens: Sequence[int]) -> Tensor:
        """Return the hidden states [R, H] of tokens behind the cache, in which they stay."""
        ids = torch.tensor([list(tokens)], device=self.ids.device)
        outputs = self._decoder(input_ids=ids, past_key_values=self.cache, use_cache=True)
        hidden: Tensor = outputs.last_hidden_state[0]
        return hidden

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

    def token_log_probs(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the prompt's own tokens, float64 [R], and whether each is the most likely.

        positions: [R], integers from 1: nothing predicts the first token.
        """
        all_tokens = torch.split(self.ids[positions.to(self.ids.device)], ROWS)
        pieces = [
            (log_probs.gather(-1, tokens[:, None])[:, 0].double().cpu(), (log_probs.argmax(-1) == tokens).cpu())
            for tokens, log_probs in zip(all_tokens, self.log_probs(positions - 1), strict=True)
        ]
        token_log_probs, most_likely = map(torch.cat, zip(*pieces, strict=True))
        return token_log_probs, most_likely


def score_answers(forward: ForwardPass, prompt: Prompt) -> dict[str, Any]:
    """Return for each answer whether all of its tokens are the most likely ones, and its log-likelihood in nats."""
    positions = torch.cat([torch.arange(first, last) for first, last in prompt.answers])
    lengths = [last - first for first, last in prompt.answers]
    log_probs, most_likely = (torch.split(values, lengths) for values in forward.token_log_probs(positions))
    return {
        "correct": [bool(tokens.all()) for tokens in most_likely],
        "log_likelihood": [float(tokens.sum()) for tokens in log_probs],
    }


def sum_negative_log_likelihood(forward: ForwardPass) -> dict[str, Any]:
    """Sum the negative log-likelihoods in nats of every token but the first, and count these tokens."""
    log_probs, _ = forward.token_log_probs(torch.arange(1, len(forward.ids)))
    return {"nll": -float(log_probs.sum()), "tokens": len(log_probs)}


def write_answer(loaded: LoadedModel, forward: ForwardPass) -> dict[str, Any]:
    """Write the model's own greedy answer behind a prompt, one token after another; the cache is used up.

    tokens: `ANSWER` of them, or fewer if the last ends the answer. prefix: what `count_prefix` counts for this same
    model: fewer only because the answer is read at once there, and rounded otherwise.
    """
    unused = copy.deepcopy(forward.cache)
    tokens = decode_tokens(loaded, forward, ANSWER)
    forward.cache = unused
    return {"tokens": tokens, **count_prefix(forward, tokens)}


def decode_tokens(
    loaded: LoadedModel, forward: ForwardPass, most: int, is_done: Callable[[list[int]], bool] = lambda tokens: False
) -> list[int]:
    """Decode greedily behind a prompt: `most` tokens, or fewer if the model ends its answer or `is_done` says so."""
    end = getattr(loaded.model.generation_config, "eos_token_id", None)
    ends = {end} if isinstance(end, int) else set(end or ())
    tokens = forward.predict()
    while len(tokens) < most and tokens[-1] not in ends and not is_done(tokens):
        tokens += forward.predict(tokens[-1:])
    return tokens


def score_ruler(loaded: LoadedModel, forward: ForwardPass, question: RulerQuestion) -> dict[str, Any]:
    """Score what a model writes behind a prompt by RULER's metric, and the right answer; the cache is used up."""
    unused = copy.deepcopy(forward.cache)
    log_likelihood = forward.score_answer(question.answer)
    forward.cache = unused

    def write(tokens: list[int]) -> str:
        text: str = loaded.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    # the metric looks for words anywhere in the text: once all are there, what follows cannot change it
    text = write(decode_tokens(loaded, forward, question.most, lambda tokens: question.score(write(tokens)) == 1))
    score = {"score": question.score(text), "text": text}
    return score | {"log_likelihood": log_likelihood, "answer_tokens": len(question.answer)}


def count_prefix(forward: ForwardPass, answer: Sequence[int]) -> dict[str, Any]:
    """Count the first tokens of an answer that the model would write too, behind its own cache, which is used up."""
    # greedy decoding follows an answer while each token is the most likely one after those before it: one pass tells
    own = forward.predict() + (forward.predict(answer[:-1]) if answer[1:] else [])
    alike = [token == expected for token, expected in zip(own, answer, strict=True)]
    return {"prefix": [*alike, False].index(False)}


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
