"""What a model predicts for a prompt: how alike two models' predictions are, and how long a prefill takes."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROWS = 512  # positions whose logits exist at once: 512 x 152064 in float32 are 0.3 GB
LOGITS = 1 << 25  # numbers of logits at once, of a vocabulary that is so small that more positions have no more


class Agreement(NamedTuple):
    """How alike two models predict the next token, position by position.

    kl: float64 [R], KL(dense || other) in nats. dense_tokens, tokens: int64 [R], the most likely token of each.
    """

    kl: Tensor
    dense_tokens: Tensor
    tokens: Tensor

    @property
    def same(self) -> Tensor:
        """Where both find the same token most likely (top-1), bool [R]."""
        return self.dense_tokens == self.tokens


def agreement(dense: Tensor, other: Tensor) -> Agreement:
    """Compare the predictions of two models at the same positions.

    Args:
        dense: the dense model's log-probabilities, float32 [R, V].
        other: the other model's, float32 [R, V].

    Returns:
        How alike they are at each position, on the device of `dense`.
    """
    kl = (dense.exp() * (dense - other)).sum(-1, dtype=torch.float64)
    return Agreement(kl, dense.argmax(-1), other.argmax(-1))


def rows_at_once(vocabulary: int) -> int:
    """How many positions' logits exist at once: a small vocabulary's work is otherwise that of launching kernels."""
    return max(ROWS, LOGITS // vocabulary)


@torch.no_grad()
def timed_prefill(model: Any, ids: Tensor, *, use_cache: bool) -> float:
    """Time one prefill, until the first token behind the prompt is known.

    Args:
        model: a model whose weights are all on the device.
        ids: the prompt's token ids, int64 [L].
        use_cache: whether the keys and values are kept, as generation needs them.

    Returns:
        Seconds by the clock.
    """
    device = next(model.parameters()).device
    ids = ids[None].to(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    logits = model(input_ids=ids, use_cache=use_cache, logits_to_keep=1).logits
    int(logits[0, -1].argmax())  # waits for the GPU
    return time.perf_counter() - start
