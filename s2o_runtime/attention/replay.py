"""A cache of the launches, and of the decision to go dense, of calls that repeat.

The launches of a call that the kernels compute are recorded once and replayed, without the Python that led to them
(`kernels.plan`). A call that goes dense is remembered as such, and its repetitions skip the checks.

Two calls are alike if everything that their checks, their backend and their launches follow from is equal: the config,
the options, and the shape, strides, type and device of every tensor. Of packed queries whose output is given only the
longest sequence counts, which is one of the options. Of a decode step, which goes dense whatever the
layer, the number of heads counts for the config, so that the layers of a model are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..call import Call, Scoring
from ..config import LayerConfig
from ..reference.dense import run_sdpa
from ..sequences import CallShape, Starts, check_config
from .backend import Backend, BackendChoice
from .compute import Attention, AttentionStats, compute

if TYPE_CHECKING:
    from ..kernels.plan import LaunchPlan, Recorder

PLANS = 4096  # plans kept, such as those of 32 layers at 128 lengths; one takes about 15 KiB
STEPS = 64  # kinds of decode steps kept: each has one more key than the last, and its layers follow one another

Inputs = tuple[Tensor | None, ...]
CallKey = tuple[object, ...]
Answer = tuple[BackendChoice, CallShape, tuple[Tensor, Tensor | None, Tensor | None]]  # the last as in `Attended`


class OpOptions(NamedTuple):
    """The optional arguments that the ops share: as for `s2o_attention`."""

    scoring: Scoring
    backend: Backend
    return_stats: bool
    return_lse: bool
    out: Tensor | None

    @property
    def keeps_more(self) -> bool:
        """True if more than the output is asked for."""
        return self.return_stats or self.return_lse


Prepare = Callable[["Recorder | None"], tuple[Call, BackendChoice]]


def run_call(
    inputs: Inputs, config: LayerConfig, options: OpOptions, prepare: Prepare, starts: Starts,
    *, lengths: tuple[object, ...] = (), is_decode: bool = False, any_length: int = 0, written: Tensor | None = None,
) -> Tensor | Attention:  # fmt: skip
    """Run a call of an op: replay the launches of an equal one, or check, compute and record this one.

    Args:
        inputs, is_decode, any_length: as for `find_repeated_call`.
        options: the arguments that the ops share; `out` becomes the output.
        prepare: checks the call and chooses its backend, with the recorder of the launches that this may take.
        starts: where the sequences begin, for the statistics.
        lengths: what else calls must have in common to be equal, hashable.
        written: `options.out` where the kernels can write it.
    """
    answer, repeated, recorder = None, None, None
    if not torch.compiler.is_compiling():
        key = (*options.scoring[:2], options.backend, options.return_stats, options.return_lse, *lengths)
        repeated = find_repeated_call(inputs, config, key, is_decode, any_length)
    if repeated is not None and (answer := repeated.replay(inputs)) is None:
        recorder = repeated.make_recorder(inputs)
    if answer is None:
        call, choice = prepare(recorder)
        if repeated is not None and choice.backend == "dense":
            repeated.remember_dense(call, choice)
        if choice.backend != "triton":
            recorder = None
        with nullcontext() if recorder is None else recorder:
            result, visited, lse = compute(call, choice.backend, written)
        answer = choice, call.shape, (result, visited if options.return_stats else None, lse)
        if repeated is not None and recorder is not None:
            repeated.keep(recorder, answer)
    choice, shape, (result, visited, lse) = answer
    if options.out is not None:  # a replay returns nothing for an output that was given
        result = options.out if written is not None else options.out.copy_(result)
    if not options.keeps_more:
        return result
    kv_start, cu_q, cu_k = starts
    stats = AttentionStats(*choice, config, shape, kv_start, visited, cu_q, cu_k) if options.return_stats else None
    return Attention(result, lse, stats)


class RepeatedCall:
    """All calls with one key, and what is known of them once there was one."""

    def __init__(self) -> None:
        self._calls = 0
        self._known: tuple[LaunchPlan, BackendChoice, CallShape] | None = None
        self._dense: tuple[float, BackendChoice, CallShape] | None = None

    def replay(self, inputs: Inputs) -> Answer | None:
        """Run the plan with these tensors; None where there is no plan, or it does not fit what goes on around it."""
        if self._dense is not None:
            scale, choice, shape = self._dense
            q, k, v = inputs[:3]
            return choice, shape, (run_sdpa(q, k, v, scale), None, None)  # type: ignore[arg-type]
        if self._known is None:
            return None
        plan, choice, shape = self._known
        outputs = plan.replay(inputs)
        return None if outputs is None else (choice, shape, outputs)

    def remember_dense(self, call: Call, choice: BackendChoice) -> None:
        """Remember that these calls run dense attention, if that is all that they need."""
        scale, softcap, sinks = call.scoring
        plain = softcap is None and sinks is None and call.kv_start is None
        if plain and not (call.packed or call.with_lse):
            assert scale is not None
            self._dense = float(scale), choice, call.shape

    def make_recorder(self, inputs: Inputs) -> Recorder | None:
        """Return the recorder of the call that comes now; None if it is not to be recorded."""
        self._calls += 1
        # the first call compiles kernels and fills caches; the ones after it are recorded, three if need be
        if self._known is not None or not 2 <= self._calls <= 4 or inputs[0] is None or not inputs[0].is_cuda:
            return None
        from ..kernels.plan import Recorder  # imports triton

        return Recorder(inputs)

    def keep(self, recorder: Recorder, answer: Answer) -> None:
        """Keep the plan of the recorded call that had this answer, if it can be repeated."""
        choice, shape, outputs = answer
        plan = recorder.plan([None if output is None or recorder.has_input(output) else output for output in outputs])
        if plan is not None:
            self._known = plan, choice, shape


def find_repeated_call(
    inputs: Inputs, config: LayerConfig, options: CallKey, is_decode: bool = False, any_length: int = 0
) -> RepeatedCall | None:
    """Return the calls that are like this one, this one included; None if nothing is kept of such calls.

    Args:
        inputs: the tensors of the call, q first; None for those that it does not have.
        options: every other argument, hashable.
        is_decode: whether such calls go dense whatever the config.
        any_length: so many of the inputs, the first ones, may have any first size, which no launch depends on.
    """
    checked = check_config(config)
    key: list[object] = [checked.num_heads if is_decode else checked.identity, options]
    gradients = torch.is_grad_enabled()
    for tensor in inputs:
        if tensor is None:
            key.append(None)
        elif type(tensor) is not Tensor or (gradients and tensor.requires_grad):
            return None
        else:
            shape = tensor.shape if any_length <= 0 else tensor.shape[1:]
            key += (shape, tensor.stride(), tensor.dtype, tensor.device)
        any_length -= 1
    return (_get_step if is_decode else _get_call)(tuple(key))


def forget_plans() -> None:
    """Drop everything that is known of calls."""
    _get_call.cache_clear()
    _get_step.cache_clear()


@lru_cache(maxsize=PLANS)
def _get_call(key: CallKey) -> RepeatedCall:
    return RepeatedCall()


@lru_cache(maxsize=STEPS)
def _get_step(key: CallKey) -> RepeatedCall:
    return RepeatedCall()
