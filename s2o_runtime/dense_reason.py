"""Reasons for a layer, or a call of it, to be dense: values that programs compare, and sentences for users."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache


class DenseReason(str, Enum):
    """A reason whose value is its sentence; where it has numbers, `about` fills them in."""

    DECODE = "decode"
    MASK = "the mask is not a plain causal one"
    SHORT_MASK = "the attention mask has fewer entries than there are keys"
    GRADIENTS = "gradients are enabled"
    TRAINING = "the model is in training mode"
    NO_S2O_HEAD = "every head of the layer is dense"
    ONE_SEGMENT = "the prompt so far fits one segment"
    TOO_SHORT = "shorter than the shortest calibrated length, {}"
    TOO_LONG = "longer than {} keys, {:g} times the longest calibrated length"
    FEW_QUERIES = "fewer than {} queries behind a prefix, where dense is faster on this GPU"
    LITTLE_WORK = "shorter than {} keys, or less work than a prompt of them, where dense is faster on this GPU"
    LAST_ROWS = "the last rows of a prompt, which answer"
    UNREAD = "rows of the model's last layer that nothing reads: they are zeros"
    ADAPTER = "the request has a LoRA adapter, which the profile is not of"
    ALL_LOGITS = "logits of more than the last rows are read, and the profile's budget is of answers"
    LOSS = "a loss over all rows is read, and the profile's budget is of answers"
    HIDDEN_STATES = "hidden states of all rows may be read, and the profile's budget is of answers"
    PROMPT_LOGPROBS = "the prompt's log-probabilities are read, and the profile's budget is of answers"
    POOLING = "hidden states of the request are pooled, and the profile's budget is of answers"
    UNKNOWN_READER = "the rows that are read of the request are not known, and the profile's budget is of answers"
    HOST = "so little work that the host would decide, not the GPU"

    __str__ = str.__str__

    @lru_cache(maxsize=256)
    def with_numbers(self, *numbers: float) -> FormattedReason:
        """Return the sentence with these numbers in it."""
        return FormattedReason(self.value.format(*numbers), self)

    @staticmethod
    def from_sentence(reason: str) -> DenseReason | None:
        """Return the reason of a sentence; None for those of one device, type or model, which nothing compares."""
        return reason if isinstance(reason, DenseReason) else getattr(reason, "reason", None)


class FormattedReason(str):
    """A reason's sentence with its numbers filled in."""

    reason: DenseReason

    def __new__(cls, text: str, reason: DenseReason) -> FormattedReason:
        sentence = super().__new__(cls, text)
        sentence.reason = reason
        return sentence

    def __getnewargs__(self) -> tuple[str, DenseReason]:  # type: ignore[override]
        return str(self), self.reason
