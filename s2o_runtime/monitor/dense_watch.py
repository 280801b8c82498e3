"""Whether a model that should run S2O is dense: one warning for each model, with the reason and what to do."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from torch import nn

from s2o_runtime.dense_reason import DenseReason

CALLS = 1000  # of every layer, after which it is judged
MOST = 0.9  # of the calls: if more than this share is dense, it is said

REMEDIES: dict[DenseReason | None, str] = {  # what to do about a dense call
    DenseReason.TOO_LONG: 'calibrate with longer --lengths, or patch with beyond="warn"',
    DenseReason.MASK: "send prompts that are padded at one end only, and not packed",
    DenseReason.GRADIENTS: "call the model under torch.no_grad() or torch.inference_mode()",
    DenseReason.TRAINING: "call model.eval() unless it is trained",
    DenseReason.NO_S2O_HEAD: "calibrate with a larger budget or longer --lengths",
}
OTHERWISE = "s2o_runtime.explain(model) lists the calls of every layer"

log = logging.getLogger("s2o_runtime")


class DenseWatch:
    """Counts the calls of one model's layers that have more than one query, which leaves out decode.

    A call is long if it has at least as many keys as the shortest calibrated length. Said once is that a long call is
    dense because of the model's mode or of autograd's if the two do not agree; that a long call does not
    reach S2O because the model has another attention implementation; and the first of these that is true: after `CALLS`
    calls of every layer, nearly all of them were too short; after `CALLS` long calls of every layer, nearly all of
    these were dense. Calls of training are not counted.

    Args:
        layers: of the model.
        min_length: the shortest calibrated length, in tokens.
    """

    def __init__(self, layers: int, min_length: int) -> None:
        self.calls = CALLS * layers
        self.min_length = min_length
        self.short = 0
        self.long = 0
        self.dense: Counter[str] = Counter()  # of the long calls, by reason
        self.done = self.said_bypassed = False
        self.modes: set[DenseReason] = set()  # that were warned about

    def see(self, path: str, reason: str, keys: int) -> None:
        """One call of one layer; only counts, until there are enough of them."""
        if self.done or reason is DenseReason.TRAINING:
            return
        if keys < self.min_length:
            self.short += 1
        else:
            self.long += 1
            if path == "dense":
                self.dense[reason] += 1
        if self.short + self.long == self.calls and self.short > MOST * self.calls:
            self._say_short()
        elif self.long == self.calls:
            self._judge_long()

    def see_mode(self, mode: DenseReason, keys: int) -> None:
        """A long call that is dense for the model's or autograd's mode. Training with gradients needs no warning."""
        if mode in self.modes or (mode is DenseReason.TRAINING and torch.is_grad_enabled()):
            return
        self.modes.add(mode)
        log.warning("S2O does not run: %s for a prompt of %d keys: %s", mode, keys, REMEDIES[mode])

    def see_forward(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A forward pre-hook of one attention layer, which sees calls that other attention functions compute.

        Args:
            module: transformers' attention module.
            arguments, named: of its `forward`; the hidden states are [B, L, E].
        """
        if self.said_bypassed or torch.compiler.is_compiling():
            return
        from transformers import AttentionInterface

        name: str = module.config._attn_implementation  # type: ignore[assignment, union-attr]
        if getattr(AttentionInterface().get(name), "__module__", "").startswith("s2o_runtime."):
            return
        hidden = arguments[0] if arguments else named["hidden_states"]
        longest = named.get("max_length_k", named.get("max_seqlen_k"))  # of a batch of continuous batching, by type
        keys = max(longest.values()) if isinstance(longest, dict) else longest or hidden.shape[1]
        if keys >= self.min_length:
            self.said_bypassed = True
            log.warning(
                "S2O does not run: the patched model has the attention implementation %r for a prompt of %d keys: call "
                'model.set_attn_implementation("s2o"), or for continuous batching do what docs/deploy.md says of your '
                "transformers",
                name,
                keys,
            )

    def _say_short(self) -> None:
        self.done = True
        log.warning(
            "S2O hardly runs: %d of the first %d calls of attention layers with more than one query had fewer than %d "
            "keys, the shortest calibrated length: calibrate with shorter --lengths, or do without S2O here",
            self.short,
            self.calls,
            self.min_length,
        )

    def _judge_long(self) -> None:
        self.done = True
        dense = self.dense.total()
        if dense <= MOST * self.long:
            return
        reason, count = self.dense.most_common(1)[0]
        log.warning(
            "S2O hardly runs: %d of the first %d calls of attention layers with %d keys or more were dense, "
            "most often (%d) for this reason: %s; %s",
            dense,
            self.long,
            self.min_length,
            count,
            reason,
            REMEDIES.get(DenseReason.of(reason), OTHERWISE),
        )
