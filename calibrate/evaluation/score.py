"""Scores of one model on one prompt: a forward pass, logits only where they are needed, an answer from the cache."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from calibrate.model import logits
from calibrate.model.layers import decoder_of
from calibrate.model.logits import ROWS, logits_of, timed_prefill
from calibrate.model.models import LoadedModel
from calibrate.prompts.prompt import Prompt
from s2o_runtime.errors import ModelError

BUCKETS = 8  # equal parts of a prompt, by position
ANSWER = 64  # tokens of a greedy answer


class ForwardPass:
    """One prompt through a model as it is patched now.

    hidden: [L, H], after the last norm. cache: its keys and values, if they are kept.
    """

    @torch.no_grad()
    def __init__(self, loaded: LoadedModel, ids: Tensor, *, cache: bool = False) -> None:
        self._logits = logits_of(loaded.model)
        self._decoder = decoder_of(loaded.model)
        self.ids = ids.to(loaded.weights.device)
        outputs = self._decoder(input_ids=self.ids[None], use_cache=cache)
        self.hidden: Tensor = outputs.last_hidden_state[0]
        self.cache: Any = outputs.past_key_values if cache else None

    @property
    def first_token(self) -> int:
        """The most likely token after the prompt."""
        (token,) = self._most_likely(self.hidden[-1:])
        return token

    @torch.no_grad()
    def following(self, tokens: Sequence[int]) -> list[int]:
        """The most likely token after each of these, which the model as it is patched now reads behind its cache."""
        ids = torch.tensor([list(tokens)], device=self.ids.device)
        outputs = self._decoder(input_ids=ids, past_key_values=self.cache, use_cache=True)
        return self._most_likely(outputs.last_hidden_state[0])

    @torch.no_grad()
    def _most_likely(self, hidden: Tensor) -> list[int]:
        tokens: list[int] = self._logits(hidden[None])[0].argmax(-1).tolist()
        return tokens

    def log_probs(self, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The model's predictions, in pieces of `ROWS` positions so that few logits exist at once.

        Args:
            positions: [R], integers.

        Returns:
            Pairs of some of the positions, [r], and the log-probabilities of the token after each, [r, V] in float32.

        Raises:
            ModelError: If a log-probability is not finite.
        """
        for rows in torch.split(positions.to(self.hidden.device), ROWS):
            with torch.no_grad():
                log_probs = self._logits(self.hidden[rows][None])[0].float().log_softmax(-1)
            if not bool(log_probs.amin(-1).isfinite().all()):
                raise ModelError(
                    f"the predictions for a prompt of {len(self.ids)} tokens hold inf or NaN, expected finite numbers: "
                    "check that the model's weights are whole and meant for this type"
                )
            yield rows, log_probs

    def token_log_probs(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """How the model predicts the prompt's own tokens at these positions.

        Args:
            positions: [R], integers from 1: nothing predicts the first token.

        Returns:
            The tokens' log-probabilities, [R] in float64, and whether each was the most likely token, [R].
        """
        token_log_probs, most_likely = [], []
        for rows, log_probs in self.log_probs(positions - 1):
            tokens = self.ids[rows + 1]
            token_log_probs.append(log_probs.gather(-1, tokens[:, None])[:, 0].double().cpu())
            most_likely.append((log_probs.argmax(-1) == tokens).cpu())
        return torch.cat(token_log_probs), torch.cat(most_likely)


def answers(forward: ForwardPass, prompt: Prompt) -> dict[str, Any]:
    """For each answer, whether all of its tokens are the most likely ones, and its log-likelihood in nats."""
    positions = torch.cat([torch.arange(first, last) for first, last in prompt.answers])
    lengths = [last - first for first, last in prompt.answers]
    log_probs, most_likely = (torch.split(values, lengths) for values in forward.token_log_probs(positions))
    return {
        "correct": [bool(tokens.all()) for tokens in most_likely],
        "log_likelihood": [float(tokens.sum()) for tokens in log_probs],
    }


def negative_log_likelihood(forward: ForwardPass) -> dict[str, Any]:
    """The sum of the negative log-likelihoods in nats of every token but the first, and how many these are."""
    log_probs, _ = forward.token_log_probs(torch.arange(1, len(forward.ids)))
    return {"nll": -float(log_probs.sum()), "tokens": len(log_probs)}


def greedy_answer(loaded: LoadedModel, forward: ForwardPass) -> dict[str, Any]:
    """What the model as it is patched now writes behind a prompt, one token after another.

    Args:
        loaded: the model.
        forward: the prompt's pass, with its cache, which is used up.

    Returns:
        tokens: `ANSWER` of them, or fewer if the last ends the answer. prefix: what `greedy_prefix` gives for this
        same model: fewer only because the answer is read at once there, and rounded otherwise.
    """
    end = getattr(loaded.model.generation_config, "eos_token_id", None)
    ends = {end} if isinstance(end, int) else set(end or ())
    unused = copy.deepcopy(forward.cache)
    tokens = [forward.first_token]
    while len(tokens) < ANSWER and tokens[-1] not in ends:
        tokens += forward.following(tokens[-1:])
    forward.cache = unused
    return {"tokens": tokens, **greedy_prefix(forward, tokens)}


def greedy_prefix(forward: ForwardPass, tokens: Sequence[int]) -> dict[str, Any]:
    """How many of an answer's first tokens the model as it is patched now would write too, behind its own cache.

    Greedy decoding writes an answer for as long as each token is the most likely one after those before it. So one
    pass over the answer tells where it would first differ.

    Args:
        forward: the prompt's pass, with its cache, which is used up.
        tokens: the answer, at least one token.
    """
    own = [forward.first_token, *(forward.following(tokens[:-1]) if tokens[1:] else ())]
    alike = [token == expected for token, expected in zip(own, tokens, strict=True)]
    return {"prefix": [*alike, False].index(False)}


def reference(forward: ForwardPass, positions: Tensor) -> Tensor:
    """The log-probabilities [R, V] after these positions [R], which other variants are compared with."""
    return torch.cat([log_probs for _, log_probs in forward.log_probs(positions)])


def agreement(forward: ForwardPass, positions: Tensor, dense: Tensor) -> dict[str, Any]:
    """KL(dense || this) in nats and the number of equal most likely tokens: sums of each part of the prompt.

    Args:
        forward: the pass to judge.
        positions: [R], integers: where the predictions are compared.
        dense: [R, V]: what `reference` gave for the dense model at these positions.
    """
    kl, same = [], []
    for (_, log_probs), rows in zip(forward.log_probs(positions), torch.split(dense, ROWS), strict=True):
        compared = logits.agreement(rows.to(log_probs.device), log_probs)
        kl.append(compared.kl.cpu())
        same.append(compared.same.cpu())
    values = {"kl": torch.cat(kl), "same": torch.cat(same), "positions": torch.ones(len(positions))}
    parts = positions * BUCKETS // len(forward.ids)
    return {name: torch.bincount(parts, value.double(), BUCKETS).tolist() for name, value in values.items()}


def first_token(loaded: LoadedModel, ids: Tensor, repeats: int) -> dict[str, Any]:
    """Time prefills until the first token is known and the cache is written, after one that is not counted.

    Args:
        loaded: the model as it is patched now.
        ids: [L], the prompt's tokens.
        repeats: how many prefills are timed.

    Returns:
        Seconds: the median, the fastest and the slowest. `peak_bytes` is the most GPU memory that was in use, weights
        included, and None on a CPU.
    """
    device = loaded.weights.device
    on_gpu = device.type == "cuda"
    seconds = []
    for _ in range(repeats + 1):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        seconds.append(timed_prefill(loaded.model, ids, use_cache=True))
    del seconds[0]
    return {
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
    }


def bucket_edges(length: int) -> list[int]:
    """The first position of each part, and one behind the last."""
    return [math.ceil(index * length / BUCKETS) for index in range(BUCKETS + 1)]
