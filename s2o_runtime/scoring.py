"""What a layer makes of the products of its queries and keys: their scale, a soft cap, and learned sinks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from s2o_runtime.errors import InputError
from s2o_runtime.shapes import CallShape, check_tensor


class ScoringOptions(TypedDict, total=False):
    """The fields of `Scoring` as optional arguments."""

    scale: float | None
    softcap: float | None
    sinks: Tensor | None


class Scoring(NamedTuple):
    """How products become weights: with x = scale * q . k, a score is s = softcap * tanh(x / softcap), or x without it.

    The weight of key j is exp(s_j) / (sum_t exp(s_t) + exp(sink)), without the last term where there are no sinks.

    Attributes:
        scale: positive; None for D ** -0.5, with D the head dim of q and k.
        softcap: bounds the scores (Gemma 2); positive, None for no bound.
        sinks: [Hq], any floating type: what each query head's rows attend to beside their keys, without a value
            (gpt-oss); None for nothing.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def checked(self, shape: CallShape, q: Tensor) -> Scoring:
        """The same with the default scale filled in.

        Args:
            shape: of the call.
            q: its queries, in the type of the call and on its device.

        Raises:
            InputError: a number is not positive, or the sinks do not fit the call.
        """
        scale, softcap, sinks = checked_scale(self.scale, shape.head_dim), self.softcap, self.sinks
        if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
            raise InputError(f"softcap is {softcap}: expected a positive number, or None for scores without a cap")
        if sinks is not None:
            check_tensor("sinks", sinks)
        if sinks is not None and (sinks.shape != (shape.query_heads,) or not sinks.dtype.is_floating_point):
            raise InputError(
                f"sinks have shape {tuple(sinks.shape)} and type {sinks.dtype}: expected a floating point number for "
                f"each of the {shape.query_heads} query heads"
            )
        if sinks is not None and sinks.device != q.device:
            raise InputError(f"sinks are on {sinks.device} but q on {q.device}: move them to one device")
        return Scoring(scale, None if softcap is None else float(softcap), sinks)

    @property
    def beyond_sdpa(self) -> str | None:
        """What of it torch's SDPA and block-sparse kernels cannot compute, as text; None for nothing."""
        if self.softcap is not None:
            return f"scores that are soft-capped at {self.softcap:g}"
        return "learned sinks" if self.sinks is not None else None

    def arguments(self) -> dict[str, Any]:
        """As the keyword arguments of the attention functions."""
        return self._asdict()


PLAIN = Scoring()


def without_gradients(sinks: Tensor | None) -> Tensor | None:
    """Sinks as a plain tensor where no gradients are wanted: a model's are parameters, whose calls have no plan."""
    return sinks.detach() if isinstance(sinks, Tensor) and not torch.is_grad_enabled() else sinks


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores of any shape under a soft cap, `softcap * tanh(scores / softcap)`; themselves without one."""
    return scores if softcap is None else (scores / softcap).tanh() * softcap


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The weights of scores [..., L] that share their denominators with sinks [..., 1], where there are any."""
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat([sinks.expand(*scores.shape[:-1], 1), scores], -1).softmax(-1)[..., 1:]


def checked_scale(scale: float | None, head_dim: int) -> float:
    """The factor of the scores: `scale`, or `head_dim ** -0.5` for None.

    Raises:
        InputError: the scale is not positive, or infinite.
    """
    if scale is None:
        return float(head_dim**-0.5)
    if not 0 < scale < math.inf:
        raise InputError(f"scale is {scale}: expected a positive number")
    return scale
