"""Does a layer's error still keep to the profile's budget? A few rows of some calls are computed densely to see.

Rows are drawn evenly over the prompt, one from each of equal parts, so that the mean over them is an unbiased
estimate of the operator's error, and drawn by generators of their own: what a program samples stays the same.
Sums stay on the device. A check reads what the one before it found, by a copy that has long arrived.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from s2o_runtime.errors import ConfigError, ProfileError
from s2o_runtime.profile import Profile
from s2o_runtime.profile.record import BudgetKind

Action = Literal["warn", "dense"]
MEMORY = 32  # checks after which one counts a third of the newest
SCORES = 1 << 24  # scores that are in memory at a time, 64 MiB

log = logging.getLogger("s2o_runtime")


@dataclass(frozen=True)
class DriftCheck:
    """How often layers are checked, and what happens when one is past its budget.

    every: of a layer's S2O calls one in so many; rows: of each sequence of that call, in all heads; action: "warn"
    once, or also run the layer "dense" from then on; margin: times the error that the profile allows the layer;
    after: checks before the first verdict, so that one unlucky prompt decides nothing.
    """

    every: int = 64
    rows: int = 32
    action: Action = "warn"
    margin: float = 2.0
    after: int = 4

    def validate(self) -> DriftCheck:
        """Raises ConfigError naming what is out of range."""
        for name in ("every", "rows", "after"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} {value!r} of the drift check is out of range: use an integer of at least 1")
        if self.action not in get_args(Action):
            raise ConfigError(f"action {self.action!r} of the drift check is not known: use one of {get_args(Action)}")
        if not isinstance(self.margin, (int, float)) or not 0 < self.margin < math.inf:
            raise ConfigError(f"margin {self.margin!r} of the drift check is out of range: use a positive number")
        return self


@dataclass(frozen=True)
class Allowed:
    """The error that one layer may have.

    kind: the unit of the limits. limits: the largest error by prompt length in tokens; lengths at which the layer is
    dense, and has no error, are left out.
    """

    kind: BudgetKind
    limits: Mapping[int, float]

    def at(self, length: int) -> float:
        """The limit of the calibrated length nearest in log length."""
        nearest = min(self.limits, key=lambda calibrated: abs(math.log2(calibrated / length)), default=None)
        return math.inf if nearest is None else self.limits[nearest]


def allowed_errors(profile: Profile) -> list[Allowed]:
    """The error that each layer may have.

    Returns:
        For each layer the limits that its held-out proof was held to; if a layer has none in the record, the budget
        for all layers.

    Raises:
        ProfileError: the record has no budget, or a budget for the mean over the layers and no limits.
    """
    budget, layers = profile.record.budget, profile.geometry.layers
    if budget is None or budget.kind is None or budget.value is None or not 0 < budget.value < math.inf:
        raise ProfileError("the profile's record names no budget that drift could be held to: calibrate again")
    limits = [_usable(profile.record.limits(layer)) for layer in range(layers)]
    if all(limits):
        return [Allowed(budget.kind, {length: limit for length, limit in one.items() if limit}) for one in limits]
    if budget.scope != "layer":
        raise ProfileError(
            "the profile's record does not say what each layer may have of the model's budget: prove it by "
            "calibrating with this budget"
        )
    return [Allowed(budget.kind, dict.fromkeys(profile.lengths, budget.value))] * layers


def _usable(limits: Mapping[int, float]) -> dict[int, float]:
    """The limits that can be compared with; a file that S2O did not write may have others."""
    return {length: limit for length, limit in limits.items() if length > 0 and 0 <= limit < math.inf}


class DriftMonitor:
    """One layer's running error, in shares of what it is allowed. A copy, or one unpickled, starts anew.

    verdict: the sentence that was said when the error passed the margin; None so far.
    """

    def __init__(self, check: DriftCheck, layer: int, allowed: Allowed) -> None:
        self.check, self.layer, self.allowed = check, layer, allowed
        self.checks = 0
        self.verdict: str | None = None
        self._calls = layer  # layers take turns
        self._generators: dict[torch.device, torch.Generator] = {}
        self._sums: Tensor | None = None  # float64 [2]: errors over their limits, and what they are relative to
        self._sent: tuple[Tensor, torch.cuda.Event | None] | None = None  # sums on their way to the host

    def __reduce__(self) -> tuple[type[DriftMonitor], tuple[DriftCheck, int, Allowed]]:
        return DriftMonitor, (self.check, self.layer, self.allowed)

    def see(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float | None, kv_start: Tensor | None) -> None:
        """Look at one S2O call, if it is its turn; shapes and types as `s2o_attention` has them.

        A turn that falls into the capture of a CUDA graph is left out.
        """
        self._calls += 1
        if self._calls % self.check.every or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self._judge()
        with torch.no_grad():
            generator = self._generator(q.device)
            error, power = sampled_errors(q, k, v, out, self.check.rows, generator, scale=scale, kv_start=kv_start)
            unit = power if self.allowed.kind == "rel_mse" else torch.ones_like(error)
            new = torch.stack((error / self.allowed.at(k.shape[2]), unit))
            old = self._sums
            self._sums = new if old is None or old.device != new.device else old * (1 - 1 / MEMORY) + new
            self.checks += 1
            self._send()
        if not q.is_cuda:
            self._judge()

    def error(self) -> float | None:
        """The running error over what is allowed; waits for the device. None before the first check."""
        return None if self._sums is None else _ratio(self._sums)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.layer)
        return self._generators[device]

    def _send(self) -> None:
        assert self._sums is not None
        event = None
        host = self._sums.to("cpu", non_blocking=True)
        if self._sums.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._sums.device))
        self._sent = host, event

    def _judge(self) -> None:
        """Read what the last check found, if it has arrived, and say so if it is too much."""
        if self._sent is None or self.verdict is not None or self.checks < self.check.after:
            return
        host, event = self._sent
        if event is not None and not event.query():  # type: ignore[no-untyped-call]
            return
        share = _ratio(host)
        if share <= self.check.margin:  # NaN is not
            return
        self.verdict = f"the sampled {self.allowed.kind} is {share:.3g} times what the profile allows"
        then = "it runs dense from now on" if self.check.action == "dense" else "it goes on"
        log.warning(
            "layer %d: %s, expected at most %g: %s; calibrate with prompts like these",
            self.layer,
            self.verdict,
            self.check.margin,
            then,
        )


def _ratio(sums: Tensor) -> float:
    error, unit = sums.tolist()
    return error / unit if unit > 0 else (0.0 if error == 0 else math.inf)


def sampled_errors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    rows: int,
    generator: torch.Generator,
    *,
    scale: float | None = None,
    kv_start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Unbiased estimates of mean((out - dense)^2) and of mean(dense^2), from `rows` query rows of each sequence.

    q, out: [B, Hq, Lq, D]; k, v: [B, Hkv, Lk, D]; kv_start: integers [B]; dense is float32 attention on these.
    Rows before `kv_start` do not count. Two float64 scalars on q's device, which is not waited for.
    """
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    group, offset = heads // kv_heads, kv_len - q_len
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = head_dim**-0.5 if scale is None else scale
    start = torch.zeros(batch, dtype=torch.int64, device=q.device) if kv_start is None else kv_start
    first = (start - offset).clamp(0, q_len)
    real = (q_len - first).double()  # rows [B]
    draw = torch.rand(batch, rows, generator=generator, dtype=torch.float64, device=q.device)
    strata = (draw + torch.arange(rows, device=q.device)) / rows
    row = (first[:, None] + (strata * real[:, None]).long()).clamp_max(q_len - 1)  # [B, R]
    places = row[:, None, :, None].expand(-1, heads, -1, head_dim)
    query, ours = q.gather(2, places).to(dtype) * scale, out.gather(2, places).to(dtype)
    key = torch.arange(kv_len, device=q.device)
    hidden = (key > (row + offset)[:, :, None]) | (key < start[:, None, None])  # [B, R, Lk]
    error, power = torch.zeros(2, batch, dtype=torch.float64, device=q.device)
    at_once = max(1, SCORES // (batch * max(group * rows, head_dim) * kv_len))
    for begin in range(0, kv_heads, at_once):
        keys, values = (t[:, begin : begin + at_once].to(dtype) for t in (k, v))
        of_group = slice(begin * group, (begin + keys.shape[1]) * group)
        queries = query[:, of_group].reshape(batch, -1, group * rows, head_dim)
        scores = queries @ keys.transpose(2, 3)  # [B, H, G * R, Lk]
        scores.view(batch, -1, group, rows, kv_len).masked_fill_(hidden[:, None, None], -math.inf)
        dense = (scores.softmax(-1) @ values).reshape(batch, -1, rows, head_dim)  # [B, H * G, R, D]
        error += (ours[:, of_group] - dense).square().sum((1, 2, 3), dtype=torch.float64)
        power += dense.square().sum((1, 2, 3), dtype=torch.float64)
    # a sequence whose queries are all padding has no dense output to compare with
    share = real / real.sum().clamp_min(1) / (heads * rows * head_dim)
    return torch.where(real > 0, error * share, 0.0).sum(), torch.where(real > 0, power * share, 0.0).sum()
