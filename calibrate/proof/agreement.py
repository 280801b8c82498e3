"""What the patched model predicts for one prompt beside the dense one, and which of its needles are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from calibrate.model.predictions import ROWS, agreement
from calibrate.prompts.prompt import Prompt

KEPT_WITHIN = 1.0  # nats


@dataclass(frozen=True)
class PromptAgreement:
    """How alike the dense and the patched model predict one prompt.

    kl: The mean over positions of KL(dense || patched) of the next token, in nats; rounding can leave a little less
    than nothing. top1: The share of positions where both find the same token most likely. found: How many of the
    prompt's answers the dense model finds. kept: How many of these the patched model keeps.

    An answer is found if each of its tokens is the most likely one after those before it. It is kept if the patched
    model finds it too, or if its log-probability fell by less than `KEPT_WITHIN`: where a model is undecided, any
    change of rounding flips what it finds, which says nothing about what it can see.
    """

    kl: float
    top1: float
    found: int
    kept: int


def compare(prompt: Prompt, dense: Tensor, patched: Tensor, logits: Callable[[Tensor], Tensor]) -> PromptAgreement:
    """Compare the two models' predictions of a prompt.

    Args:
        prompt: The prompt.
        dense, patched: Hidden states [1, L, H] after the last layer.
        logits: [1, R, H] -> [1, R, V].
    """
    kl, same = 0.0, 0
    following = torch.roll(prompt.ids, -1).to(dense.device)
    tokens: list[list[Tensor]] = [[], []]
    log_probabilities: list[list[Tensor]] = [[], []]
    pieces = zip(
        *(torch.split(tensor, ROWS, 1) for tensor in (dense, patched)), torch.split(following, ROWS), strict=True
    )
    for *hidden, next_tokens in pieces:
        both = [logits(rows)[0].float().log_softmax(-1) for rows in hidden]
        compared = agreement(*both)
        kl += float(compared.kl.sum())
        same += int(compared.same.sum())
        for model, best in enumerate((compared.dense_tokens, compared.tokens)):
            tokens[model].append(best.cpu())
            log_probabilities[model].append(both[model].gather(1, next_tokens[:, None])[:, 0].double().cpu())
    by_dense, by_patched = (
        _Predicted(prompt, torch.cat(best), torch.cat(of_next))
        for best, of_next in zip(tokens, log_probabilities, strict=True)
    )
    answers = [span for span in prompt.answers if by_dense.finds(span)]
    kept = [
        by_patched.finds(span) or by_dense.log_probability(span) - by_patched.log_probability(span) < KEPT_WITHIN
        for span in answers
    ]
    return PromptAgreement(
        kl=kl / prompt.length,
        top1=same / prompt.length,
        found=len(answers),
        kept=sum(kept),
    )


@dataclass(frozen=True)
class _Predicted:
    """What one model says of a prompt: the most likely token after each, int64 [L], and the log-probability of the one
    that follows, float64 [L]."""

    prompt: Prompt
    best: Tensor
    of_next: Tensor

    def finds(self, span: tuple[int, int]) -> bool:
        first, end = span
        return bool((self.best[first - 1 : end - 1] == self.prompt.ids[first:end]).all())

    def log_probability(self, span: tuple[int, int]) -> float:
        first, end = span
        return float(self.of_next[first - 1 : end - 1].sum())
