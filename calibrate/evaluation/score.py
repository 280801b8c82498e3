"""What a model makes of a prompt, teacher-forced: one forward pass, and logits only where they are looked at."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from calibrate.evaluation.tasks import Asked
from calibrate.models import LoadedModel
from s2o_runtime.errors import ModelError

ROWS = 512  # positions whose logits exist at once: 512 x 152064 in float32 are 0.3 GB
BUCKETS = 8  # equal parts of a prompt, by position


class Reading:
    """One prompt read by a model as it is patched now. hidden: [L, H], after the last norm."""

    @torch.no_grad()
    def __init__(self, loaded: LoadedModel, ids: Tensor) -> None:
        self._head = loaded.model.get_output_embeddings()
        decoder = loaded.model.get_decoder()
        self.ids = ids.to(loaded.weights.device)
        self.hidden: Tensor = decoder(input_ids=self.ids[None], use_cache=False).last_hidden_state[0]

    def log_probs(self, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of the positions [R], and what is predicted after each: log-probabilities [R, V] in float32.

        Raises ModelError if they are not finite.
        """
        for rows in torch.split(positions.to(self.hidden.device), ROWS):
            with torch.no_grad():
                found = self._head(self.hidden[rows]).float().log_softmax(-1)
            if not bool(found.amin(-1).isfinite().all()):
                raise ModelError(
                    f"the predictions for a prompt of {len(self.ids)} tokens hold inf or NaN, expected finite numbers: "
                    "check that the model's weights are whole and meant for this type"
                )
            yield rows, found

    def told(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """For the tokens at these positions [R]: their log-probability, and whether each was the most likely one."""
        likely, best = [], []
        for rows, found in self.log_probs(positions - 1):
            wanted = self.ids[rows + 1]
            likely.append(found.gather(-1, wanted[:, None])[:, 0].double().cpu())
            best.append((found.argmax(-1) == wanted).cpu())
        return torch.cat(likely), torch.cat(best)


def answers(reading: Reading, asked: Asked) -> dict[str, Any]:
    """Each answer: whether all of its tokens are the most likely ones, and its log-likelihood in nats."""
    correct, likelihood = [], []
    for first, last in asked.answers:
        likely, best = reading.told(torch.arange(first, last))
        correct.append(bool(best.all()))
        likelihood.append(float(likely.sum()))
    return {"correct": correct, "log_likelihood": likelihood}


def surprise(reading: Reading) -> dict[str, Any]:
    """Negative log-likelihood in nats of every token but the first: sums and counts by `bucket_of`."""
    length = len(reading.ids)
    positions = torch.arange(1, length)
    likely, _ = reading.told(positions)
    return {"nll": _sums(-likely, positions, length), "tokens": _counts(positions, length)}


def reference(reading: Reading, positions: Tensor) -> Tensor:
    """The log-probabilities [R, V] at some positions, kept on the CPU to compare others with."""
    return torch.cat([found.cpu() for _, found in reading.log_probs(positions)])


def agreement(reading: Reading, positions: Tensor, dense: Tensor) -> dict[str, Any]:
    """KL(dense || this) in nats and the number of equal most likely tokens: sums and counts by `bucket_of`.

    positions: [R]; dense: what `reference` gave for them.
    """
    divergence, same = [], []
    for (_, found), rows in zip(reading.log_probs(positions), torch.split(dense, ROWS), strict=True):
        p = rows.to(found.device)
        divergence.append((p.exp() * (p - found)).sum(-1, dtype=torch.float64).cpu())
        same.append((p.argmax(-1) == found.argmax(-1)).cpu())
    length = len(reading.ids)
    return {
        "kl": _sums(torch.cat(divergence), positions, length),
        "same": _sums(torch.cat(same).double(), positions, length),
        "positions": _counts(positions, length),
    }


def first_token(loaded: LoadedModel, ids: Tensor, repeats: int) -> dict[str, Any]:
    """Seconds until the first token is known, cache written, after one run that is not counted.

    peak_bytes: the most GPU memory that was in use, weights included; None on a CPU, which does not say.
    """
    device = loaded.weights.device
    on_gpu = device.type == "cuda"
    ids = ids[None].to(device)
    seconds = []
    for turn in range(repeats + 1):
        if on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        with torch.no_grad():
            logits = loaded.model(input_ids=ids, use_cache=True, logits_to_keep=1).logits
        int(logits[0, -1].argmax())  # waits for the GPU
        if turn:
            seconds.append(time.perf_counter() - began)
        del logits
    return {
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
    }


def bucket_of(positions: Tensor, length: int) -> Tensor:
    """The part of a prompt in which a position lies, 0 to BUCKETS - 1."""
    return positions * BUCKETS // length


def bucket_edges(length: int) -> list[int]:
    """The first position of each part, and one behind the last."""
    return [math.ceil(index * length / BUCKETS) for index in range(BUCKETS + 1)]


def _sums(values: Tensor, positions: Tensor, length: int) -> list[float]:
    sums = torch.zeros(BUCKETS, dtype=torch.float64)
    sums.index_add_(0, bucket_of(positions, length), values.double())
    return [float(each) for each in sums]


def _counts(positions: Tensor, length: int) -> list[int]:
    return [int(each) for each in torch.bincount(bucket_of(positions, length), minlength=BUCKETS)]
