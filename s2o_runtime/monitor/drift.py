"""Check that layers' errors keep to the profile's budget: a few rows of some calls are computed densely.

Half of the rows are drawn from the last eighth of the prompt, the rows that answer the user, and half from the rows
before it, evenly in each. The two halves are weighted by the rows they stand for, so that the mean is an unbiased
estimate of the operator's error; the last eighth has a number of its own beside it. Rows are drawn by generators of
their own: what a program samples stays the same.

A layer is past its budget in one of two cases: its running mean is, or so many of its last checks were far above it
that some of its prompts are not like those it was calibrated on, although the mean hides them. Both are judged from
numbers that stay on the device: a check reads what the one before it found, by a copy that has long arrived.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..call import PLAIN, Scoring, cap_scores, softmax
from ..dense_reason import DenseReason
from ..errors import ConfigError, ProfileError
from ..fields import Rule, check_fields, validated_field
from ..lengths import find_nearest
from ..profile import Profile
from ..profile.record import ErrorUnit, get_error_unit, read_budget, read_limits

Action = Literal["warn", "dense"]
DriftChoice = Literal["auto", "off", "warn", "dense"]

LAST_ROWS = 8  # the last eighth of a prompt
# How much more of the limit the last eighth may have than the mean: on prompts like the calibrated ones it has 1.4 to 3
# times the mean.
LAST_SHARE = 2.0

# These numbers were chosen by simulation (tests/huggingface/test_drift.py), with errors of a prompt over the limit that
# are lognormal: mean 0.8, a deviation of the logarithm of 0.75 to 0.85, as on SmolLM2, and 0.25 from sampling rows. Of
# such layers 0.3% are warned about within 1000 checks. Where one prompt in six has 5.9 times the limit, half of the
# layers are noticed within 60 checks and 95% within 140; where all prompts have, within 16.
MEMORY = 64  # checks after which one counts a third of the newest in the running mean
HISTORY = 64  # checks that are kept one by one
HIGH = 2.0  # times the margin: a check above this counts as high
HIGH_CHECKS = 8  # of those kept: so many that are high are too many
HEAD_CAP = 2.0  # equal parts of its layer's budget that one head may spend (docs/results/head-cap-demo-cpu.txt)

SCORES = 1 << 24  # scores that are in memory at a time, 64 MiB

log = logging.getLogger("s2o_runtime")


@dataclass(frozen=True)
class DriftCheck:
    """Settings of the check: how often layers are checked, and what happens when one is past its budget.

    every: of a layer's S2O calls one in so many; rows: of each sequence of that call, in all heads; action: "warn"
    once, or also run the layer "dense" from then on; margin: times the error that the profile allows the layer, what
    the running mean may have, and half of what a check may have without being counted as high; after: checks before the
    running mean is judged, so that one unlucky prompt decides nothing.

    >>> DriftCheck(every=64, action="dense").validate().rows
    32
    """

    every: int = validated_field(256, Rule(int, low=1))
    rows: int = validated_field(32, Rule(int, low=2))
    action: Action = validated_field("warn", Rule(str, allowed=get_args(Action)))
    margin: float = validated_field(2.0, Rule(float, low=0, above=True))
    after: int = validated_field(16, Rule(int, low=1))

    def validate(self) -> DriftCheck:
        """Return the check itself. Raises ConfigError naming what is out of range."""
        check_fields(self, "the drift check")
        return self


Drift = DriftCheck | DriftChoice | None


def read_check(drift: Drift) -> DriftCheck | None:
    """Return the check that is meant, None for none. Raises ConfigError if it is illegal or not known."""
    if isinstance(drift, DriftCheck):
        return drift.validate()
    if drift is None or drift == "off":
        return None
    if drift in ("auto", "warn", "dense"):
        return DriftCheck(action="dense" if drift == "dense" else "warn")
    raise ConfigError(f"drift {drift!r} is not known: use a DriftCheck, None or one of {get_args(DriftChoice)}")


@dataclass(frozen=True)
class ErrorLimits:
    """The error that one layer may have by prompt length in tokens, without lengths at which the layer is dense."""

    unit: ErrorUnit
    limits: Mapping[int, float]

    def at(self, length: int) -> float:
        """Return the limit of the calibrated length nearest in log length."""
        lengths = sorted(self.limits)
        return self.limits[lengths[find_nearest(lengths, length)]] if lengths else math.inf


def read_error_limits(profile: Profile) -> list[ErrorLimits]:
    """Return the limits that each layer's held-out proof was held to, or the budget where the record lacks a layer's.

    Raises:
        ProfileError: the record has no budget, or one that is no layer's own and no limits.
    """
    budget, layers = read_budget(profile.record), profile.geometry.layers
    if budget.kind is None or budget.value is None or not 0 < budget.value < math.inf:
        raise ProfileError("the profile's record names no budget that drift could be held to: calibrate again")
    unit = get_error_unit(budget.kind)
    # a file that S2O did not write may have limits that nothing can be compared with
    usable = [
        {
            length: limit
            for length, limit in read_limits(profile.record, layer).items()
            if length > 0 and 0 <= limit < math.inf
        }
        for layer in range(layers)
    ]
    if all(usable):
        return [ErrorLimits(unit, {length: limit for length, limit in row.items() if limit}) for row in usable]
    if budget.kind != unit:  # a KL is no layer's error
        raise ProfileError(
            "the profile's record does not say what each layer may have of the model's budget: prove it by "
            "calibrating with this budget"
        )
    return [ErrorLimits(unit, dict.fromkeys(profile.lengths, budget.value))] * layers


def check_and_limits(profile: Profile, drift: Drift, speaker: str = "") -> tuple[DriftCheck | None, list[ErrorLimits]]:
    """Return the drift check that is meant and what each layer may have.

    For "auto" there is none where the profile does not say what errors it allows; the log, after `speaker`, says why.
    """
    check = read_check(drift)
    if check is None:
        return None, []
    try:
        return check, read_error_limits(profile)
    except ProfileError as error:
        if drift != "auto":
            raise
        log.info("%sdrift is not checked: %s", speaker, error)
        return None, []


class DriftNumbers(NamedTuple):
    """Results of a layer's checks; errors are in shares of what the profile allows."""

    mean: float  # the running error over all rows
    last: float  # and over the last eighth of the prompt
    high: float  # share of the last `HISTORY` checks that were above `HIGH` times the margin


class DriftMonitor:
    """The running error of one layer, in shares of what it is allowed. Copies start empty."""

    def __init__(self, check: DriftCheck, layer: int, allowed: ErrorLimits) -> None:
        self.check, self.layer, self.allowed = check, layer, allowed
        self.checks = 0
        self.verdict: str | None = None  # the sentence that was said when the error was too much
        self._calls = layer  # layers take turns
        self._generators: dict[torch.device, torch.Generator] = {}
        # float64 [4 + HISTORY]: running sums of errors over their limits and of what they are relative to, over all
        # rows and over the last eighth; then the shares of the last checks, the newest at the end.
        self._sums: Tensor | None = None
        self._sent: tuple[Tensor, int, torch.cuda.Event | None] | None = None  # on its way to the host, after n checks

    def __reduce__(self) -> tuple[type[DriftMonitor], tuple[DriftCheck, int, ErrorLimits]]:
        return DriftMonitor, (self.check, self.layer, self.allowed)

    def see(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scoring: Scoring, kv_start: Tensor | None,
        length: int | None = None,
    ) -> None:  # fmt: skip
        """Check one S2O call if it is its turn, but not while a CUDA graph is captured.

        Args:
            q, out: [B, Hq, Lq, D] and [B, Hq, Lq, Dv]; k, v: [B, Hkv, Lk, D] and [B, Hkv, Lk, Dv].
            scoring, kv_start: as for `sample_errors`.
            length: of the prompt whose settings the call ran; None for the number of keys.
        """
        self._calls += 1
        if self._calls % self.check.every or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self._judge()
        with torch.no_grad():
            if q.device not in self._generators:
                self._generators[q.device] = torch.Generator(q.device).manual_seed(self.layer)
            generator = self._generators[q.device]
            sampled = sample_errors(q, k, v, out, self.check.rows, generator, scoring, kv_start)
            self._add(sampled, self.allowed.at(length or k.shape[2]))
        if not q.is_cuda:
            self._judge()

    def numbers(self) -> DriftNumbers | None:
        """Return the results of the checks so far; waits for the device. None before the first one."""
        return None if self._sums is None else _summarise(self._sums.tolist(), self.checks, self.check.margin)

    def _add(self, sampled: SampledErrors, limit: float) -> None:
        """Add one more check to the sums and the history, and send them to the host without waiting for the device."""
        error, power, last_error, last_power = sampled
        if self.allowed.unit == "mse":
            power = last_power = torch.ones_like(error)
        new = torch.stack((error / limit, power, last_error / limit, last_power))
        errors, units = new[::2], new[1::2]
        ratios = torch.where(units > 0, errors / units, torch.where(errors == 0, 0.0, math.inf))
        share = torch.maximum(ratios[0], ratios[1] / LAST_SHARE)
        if self._sums is None or self._sums.device != new.device:
            self._sums, self.checks = new.new_zeros(4 + HISTORY), 0
        sums = self._sums[:4] * (1 - 1 / MEMORY) + new
        self._sums = torch.cat((sums, self._sums[5:], share[None]))
        self.checks += 1
        event, host = None, self._sums.to("cpu", non_blocking=True)
        if self._sums.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._sums.device))
        self._sent = host, self.checks, event

    def _judge(self) -> None:
        """Read the results of the last check, if they have arrived, and warn if they are too much."""
        if self._sent is None or self.verdict is not None:
            return
        host, checks, event = self._sent
        if event is not None and not event.query():  # type: ignore[no-untyped-call]
            return
        if problem := _find_problem(host.tolist(), checks, self.check, self.allowed.unit):
            self.verdict = DenseReason.DRIFT.fill_in(problem)
            then = "it runs dense from now on" if self.check.action == "dense" else "it goes on"
            log.warning("layer %d: %s: %s; calibrate with prompts like these", self.layer, self.verdict, then)


def _summarise(sums: Sequence[float], checks: int, margin: float) -> DriftNumbers:
    error, unit, last_error, last_unit, *history = sums
    kept = history[-min(checks, HISTORY) :]
    high = sum(not share <= HIGH * margin for share in kept)  # NaN is high

    def divide(error: float, unit: float) -> float:
        return error / unit if unit > 0 else (0.0 if error == 0 else math.inf)

    return DriftNumbers(divide(error, unit), divide(last_error, last_unit), high / len(kept))


def _find_problem(sums: Sequence[float], checks: int, check: DriftCheck, unit: str) -> str | None:
    """Return in words what is too much about a layer's errors, None if nothing is. sums: as `DriftMonitor` has them."""
    numbers, margin = _summarise(sums, checks, check.margin), check.margin
    if checks >= check.after:
        means = ((numbers.mean, margin, ""), (numbers.last, LAST_SHARE * margin, " in the last eighth of the prompts"))
        for share, most, where in means:
            if not share <= most:  # so NaN is too much
                times = f"{share:.3g} times what the profile allows, expected at most {most:g}"
                return f"the sampled {unit}{where} is {times}"
    kept = min(checks, HISTORY)
    high = round(numbers.high * kept)
    if high >= HIGH_CHECKS:
        return (
            f"in {high} of the last {kept} checks the sampled {unit} was more than {HIGH * margin:g} times what the "
            f"profile allows, expected in at most {HIGH_CHECKS - 1}"
        )
    return None


class SampledErrors(NamedTuple):
    """Estimates of a call's error, float64 scalars on its device, which was not waited for."""

    error: Tensor  # mean((out - dense)^2) over all rows, unbiased
    power: Tensor  # mean(dense^2)
    last_error: Tensor  # the same over the rows of the last eighth of each sequence, 0 if the call has none
    last_power: Tensor


def sample_errors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    rows: int,
    generator: torch.Generator,
    scoring: Scoring = PLAIN,
    kv_start: Tensor | None = None,
) -> SampledErrors:
    """Estimate errors against float32 dense attention, from `rows` query rows of each sequence.

    Half of the rows, rounded up, are of the last eighth of the sequence, as far as the call has it; the others are of
    the call's rows before it. In each part one row is drawn from each of equal strata.

    Args:
        q, out: [B, Hq, Lq, D] and [B, Hq, Lq, Dv].
        k, v: [B, Hkv, Lk, D] and [B, Hkv, Lk, Dv].
        rows: at least 2.
        generator: on the device of q.
        scoring: the factor of the scores, their cap and the sinks.
        kv_start: the first key of each sequence, integers [B]; rows before it do not count.
    """
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, value_dim = k.shape[1], k.shape[2], v.shape[3]
    group, offset = heads // kv_heads, kv_len - q_len
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    _, softcap, sinks = scoring
    scale = head_dim**-0.5 if scoring.scale is None else scoring.scale
    start = torch.zeros(batch, dtype=torch.int64, device=q.device) if kv_start is None else kv_start
    row, real = _draw_rows(rows, start - offset, q_len, generator)
    index = row[:, None, :, None]
    query = q.gather(2, index.expand(-1, heads, -1, head_dim)).to(dtype) * scale
    ours = out.gather(2, index.expand(-1, heads, -1, value_dim)).to(dtype)
    key = torch.arange(kv_len, device=q.device)
    hidden = (key > (row + offset)[:, :, None]) | (key < start[:, None, None])  # [B, R, Lk]
    error, power = torch.zeros(2, batch, rows, dtype=torch.float64, device=q.device)
    at_once = max(1, SCORES // (batch * max(group * rows, head_dim) * kv_len))
    for begin in range(0, kv_heads, at_once):
        keys, values = (t[:, begin : begin + at_once].to(dtype) for t in (k, v))
        group_heads = slice(begin * group, (begin + keys.shape[1]) * group)
        queries = query[:, group_heads].reshape(batch, -1, group * rows, head_dim)
        scores = cap_scores(queries @ keys.transpose(2, 3), softcap)  # [B, H, G * R, Lk]
        scores.view(batch, -1, group, rows, kv_len).masked_fill_(hidden[:, None, None], -math.inf)
        row_sinks = None
        if sinks is not None:  # [H, G * R, 1]
            row_sinks = sinks[group_heads].to(dtype).view(-1, group).repeat_interleave(rows, 1)[..., None]
        dense = (softmax(scores, row_sinks) @ values).reshape(batch, -1, rows, value_dim)  # [B, H * G, R, Dv]
        error += (ours[:, group_heads] - dense).square().sum((1, 3), dtype=torch.float64)
        power += dense.square().sum((1, 3), dtype=torch.float64)
    error, power = (_sum_parts(squares, real) / (heads * value_dim) for squares in (error, power))  # [2]
    all_rows, last_rows = real.sum().clamp_min(1), real[:, 1].sum().clamp_min(1)
    return SampledErrors(error.sum() / all_rows, power.sum() / all_rows, error[1] / last_rows, power[1] / last_rows)


def _draw_rows(rows: int, first: Tensor, q_len: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw rows of each sequence, int64 [B, rows], those of the last eighth behind; and count what they stand for.

    first: int64 [B], the row at which each sequence begins; negative where the call continues it. The counts, float64
    [B, 2], are of the call's rows before the last eighth and in it.
    """
    border = (q_len - (q_len - first).div(LAST_ROWS, rounding_mode="floor")).clamp(0, q_len)
    begins = torch.stack((first.clamp(0, q_len), border), 1)  # [B, 2]
    real = torch.stack((begins[:, 1] - begins[:, 0], q_len - begins[:, 1]), 1).double()
    draw = torch.rand(len(first), rows, generator=generator, dtype=torch.float64, device=first.device)
    halves = []
    for half, draws in enumerate((draw[:, : rows // 2], draw[:, rows // 2 :])):
        strata = (draws + torch.arange(draws.shape[1], device=first.device)) / draws.shape[1]
        halves.append(begins[:, half, None] + (strata * real[:, half, None]).long())
    return torch.cat(halves, 1).clamp_max(q_len - 1), real


def _sum_parts(squares: Tensor, real: Tensor) -> Tensor:
    """Estimate the sums over the rows of both parts, of all sequences, from sampled rows [B, R]: [2]."""
    before = squares.shape[1] // 2
    means = torch.stack((squares[:, :before].mean(1), squares[:, before:].mean(1)), 1)
    # a part without rows, or only with padding, has no dense output to compare with
    return torch.where(real > 0, means * real, 0.0).sum(0)
