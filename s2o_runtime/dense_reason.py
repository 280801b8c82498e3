"""Reasons for a layer, or a call of it, to be dense: values that programs compare, and sentences for users."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache


class DenseReason(str, Enum):
    """A reason whose value is its sentence, and whose name, which stays, is its code in metrics; `fill_in` fills {}."""

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
    UNKNOWN_REQUEST = "the rows are none of the scheduler's requests, as those of microbatches, or of an unknown step"
    HOST = "so little work that the host would decide, not the GPU"
    UNTESTED = "the layer has not passed its self-test yet"
    SELF_TEST = "its self-test failed: without a threshold S2O differs from the stock backend in heads {}"
    DRIFT = "{}"  # the drift check's verdict
    FAULT = "S2O failed: {}"
    SWITCHED_OFF = "S2O is switched off"
    OPTED_OUT = "the request asks for dense attention"
    SHADOW = "S2O only computes beside the stock backend, which answers (shadow mode)"

    __str__ = str.__str__

    @lru_cache(maxsize=256)
    def fill_in(self, *values: float | str) -> FormattedReason:
        """Return the sentence with these numbers or texts in it."""
        return FormattedReason(self.value.format(*values), self)

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
