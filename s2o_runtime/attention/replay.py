"""Calls that come again: their launches are recorded once and replayed, without the Python that led to them.

Two calls have one plan if everything that their checks, their backend and their launches follow from is equal: the
config, the options, and the shape, strides, type and device of every tensor. `kernels.plan` has the plans.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from s2o_runtime.attention.backend import BackendChoice
from s2o_runtime.config import LayerConfig
from s2o_runtime.shapes import CallShape

if TYPE_CHECKING:
    from s2o_runtime.kernels.plan import Plan, Recorder

PLANS = 1024  # plans kept, such as those of 32 layers at 32 lengths

Inputs = tuple[Tensor | None, ...]
CallKey = tuple[object, ...]
CallOutputs = tuple[Tensor, Tensor | None, Tensor | None]  # out, visited, lse, as `compute.Outputs`
Answer = tuple[BackendChoice, CallShape, CallOutputs]


class RepeatedCall:
    """All calls with one key, and their plan once there is one.

    The first call compiles kernels and fills caches; the ones after it are recorded, three if need be.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._known: tuple[Plan, BackendChoice, CallShape] | None = None

    def replay(self, inputs: Inputs) -> Answer | None:
        """Run the plan with these tensors; None where there is no plan, or it does not fit what goes on around it."""
        if self._known is None:
            return None
        plan, choice, shape = self._known
        outputs = plan.replay(inputs)
        return None if outputs is None else (choice, shape, outputs)

    def recorder(self, inputs: Inputs) -> Recorder | None:
        """What is to record the call that comes now; None if it is not to be recorded."""
        self._calls += 1
        if self._known is not None or not 2 <= self._calls <= 4:
            return None
        from s2o_runtime.kernels.plan import Recorder  # imports triton

        return Recorder(inputs)

    def keep(self, recorder: Recorder, answer: Answer) -> None:
        """Keep the plan of the recorded call that had this answer, if it can be repeated."""
        choice, shape, outputs = answer
        plan = recorder.plan(outputs)
        if plan is not None:
            self._known = plan, choice, shape


def repeated_call(inputs: Inputs, config: LayerConfig, options: CallKey) -> RepeatedCall | None:
    """The calls that are like this one, this one included; None if such calls have no plan.

    Args:
        inputs: the tensors of the call, q first; None for those that it does not have.
        options: every other argument, hashable.
    """
    if inputs[0] is None or not inputs[0].is_cuda or config.baseline_heads:  # torch selects a baseline's blocks
        return None
    key: list[object] = [config.identity, options]
    gradients = torch.is_grad_enabled()
    for tensor in inputs:
        if tensor is None:
            key.append(None)
        elif type(tensor) is not Tensor or (gradients and tensor.requires_grad):
            return None
        else:
            key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    return _calls(tuple(key))


def forget_plans() -> None:
    """Drop every plan."""
    _calls.cache_clear()


@lru_cache(maxsize=PLANS)
def _calls(key: CallKey) -> RepeatedCall:
    return RepeatedCall()
