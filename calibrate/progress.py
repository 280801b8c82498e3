"""Progress of a long run: a bar for each phase on a terminal, else lines with percentages and the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TypeVar

from tqdm import tqdm

from s2o_runtime.fields import pluralize
from s2o_runtime.logs import emit_line, should_write_json

# Of the whole plan so much counts as taken as planned, beside phases that were slower or quicker: few say little.
SLOWER = 0.02
QUICKER = 0.1
SILENCE = 30.0  # seconds after which a line of progress is written even if no tenth is reached
T = TypeVar("T")


class PhaseClock:
    """The seconds that each phase of a run took, by the phase's name, in the order in which they first ended.

    `expected` is what each phase is expected to take, in the phases' order; progress then says what is left of the run.
    `continues` is True once a part of the run was found in a journal.
    """

    def __init__(
        self, expected: Mapping[str, float] = MappingProxyType({}), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds: dict[str, float] = {}
        self.continues = False
        self._expected, self._clock = dict(expected), clock
        self._phase, self._start = "", clock()

    @contextmanager
    def time_phase(self, name: str, announced: bool = False) -> Iterator[None]:
        """Time the block as the phase `name`, and say first that it begins if it is to be `announced`."""
        self._phase, self._start = name, self._clock()
        if announced:
            left = self.estimate_left(None)
            line = f"{name} .."
            if left is not None:
                line += f" {format_duration(left)} until the end"
            emit_line("calibrate.progress", line, {"phase": name})
        with _set(_run, self):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - self._start

    def estimate_left(self, phase_left: float | None) -> float | None:
        """Return the seconds until the run ends; None where nothing was expected of this phase.

        phase_left: what is left of this phase; None if only what was expected says it.
        """
        if self._phase not in self._expected:
            return None
        names = list(self._expected)
        number = names.index(self._phase)
        spent, planned = self._clock() - self._start, self._expected[self._phase]
        before = [name for name in names[:number] if name in self.seconds]
        if self.continues:  # what was quicker may have been in the journal
            before = [name for name in before if self.seconds[name] >= self._expected[name]]
        took = sum(self.seconds[name] for name in before)
        planned_before = sum(self._expected[name] for name in before)
        if phase_left is None:
            phase_left = max(0.0, self._compute_pace(took, planned_before) * planned - spent)
        pace = self._compute_pace(took + spent + phase_left, planned_before + planned)
        return phase_left + pace * sum(self._expected[name] for name in names[number + 1 :])

    def _compute_pace(self, took: float, planned: float) -> float:
        """Return how many times as long as planned later phases take, by the seconds of those so far."""
        if self.continues and took <= planned:
            return 1.0
        share = SLOWER if took > planned else QUICKER
        doubt = share * sum(self._expected.values())
        return (took + doubt) / (planned + doubt)


_NOTHING_EXPECTED = PhaseClock()
_run: ContextVar[PhaseClock] = ContextVar("run", default=_NOTHING_EXPECTED)
_status: ContextVar[Callable[[], str]] = ContextVar("status", default=str)  # by default an empty text


@contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def show_status(status: Callable[[], str]) -> Iterator[None]:
    """Show this text behind every bar inside the block, such as what many workers do."""
    with _set(_status, status):
        yield


class ProgressLines:
    """Progress as lines of a log: one for each tenth of the steps, and one whenever nothing was said for a while.

    A step is one `unit`; `total` is None if it is unknown how many there will be. With `part` the phase goes on behind
    it: only silence is broken, and the plan says what is left until the end.
    """

    def __init__(
        self,
        description: str,
        total: int | None,
        unit: str,
        clock: Callable[[], float] = time.monotonic,
        part: bool = False,
    ) -> None:
        self._description, self._total, self._unit, self._clock, self._part = description, total, unit, clock, part
        self._done, self._known, self._tenths = 0, 0, 0
        self._start = self._last = clock()

    def step(self, text: str = "", steps: int = 1, *, known: bool = False) -> None:
        """Count steps, and say so if it is time. Steps that are `known` took no time, which `text` says."""
        self._done += steps
        tenths = 10 * self._done // self._total if self._total else 0
        if known:
            _run.get().continues = True
            self._known += steps
            self._tenths = tenths
            counts = f"{self._done} of {self._total} {self._unit}s"
            emit_line("calibrate.progress", f"{self._description}: continuing: {counts} {text}", {"done": self._done})
        elif (tenths > self._tenths and not self._part) or self._clock() - self._last >= SILENCE:
            self._tenths = tenths
            self.say()

    def say(self) -> None:
        """Write a line."""
        self._last = self._clock()
        seconds, left = self._last - self._start, None
        fields: dict[str, object] = {"phase": self._description, "done": self._done, "seconds": round(seconds, 1)}
        if not self._total:
            line = f"{pluralize(self._done, self._unit)}, {format_duration(seconds)} so far"
        else:
            share = self._done / self._total
            fields |= {"total": self._total, "percent": round(100 * share)}
            line = f"{share:.0%} ({self._done} of {self._total} {self._unit}s), "
            if self._done >= self._total:
                left = 0.0
                line += f"took {format_duration(seconds)}"
            else:
                left = seconds * (self._total - self._done) / max(1, self._done - self._known)
                fields["seconds_left"] = round(left, 1)
                line += f"{format_duration(left)} left"
        if (run_left := _estimate_run_left(left, self._part)) is not None:
            line += f", {format_duration(run_left)} until the end"
            fields["run_seconds_left"] = round(run_left, 1)
        if status := _status.get()():
            line += f"; {status}"
            fields["status"] = status
        emit_line("calibrate.progress", f"{self._description}: {line}", fields)


def _estimate_run_left(left: float | None, part: bool) -> float | None:
    """Return the seconds until the run ends, given what is left of the steps; with `part` of a phase that goes on."""
    run_left = _run.get().estimate_left(None if part else left)
    return None if run_left is None else max(run_left, left or 0.0)


def format_duration(seconds: float) -> str:
    """Format seconds: "45 s", "12 min", "3 h 20 min"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def show_progress(
    description: str, total: int | None, unit: str, *, shown: bool, part: bool = False
) -> Iterator[Callable[..., None]]:
    """Show progress inside the block if it is to be `shown`: a bar on a terminal, else `ProgressLines`.

    Yields:
        A function like `ProgressLines.step` that advances the bar, behind which the text is shown.
    """
    if not shown:
        yield lambda text="", steps=1, known=False: None
        return
    if should_write_json() or not sys.stderr.isatty():
        lines = ProgressLines(description, total, unit, part=part)
        yield lines.step
        if total is None:
            lines.say()
        return
    with tqdm(total=total, desc=description, unit=unit, leave=not part) as bar:

        def step(text: str = "", steps: int = 1, *, known: bool = False) -> None:
            if known:
                _run.get().continues = True
                tqdm.write(f"{description}: continuing: {steps} of {total} {unit}s {text}", sys.stderr)
                bar.initial += steps
                bar.n += steps
                return
            bar.update(steps)
            rate = bar.format_dict["elapsed"] / max(1, bar.n - bar.initial)
            run_left = _estimate_run_left(None if total is None else rate * (total - bar.n), part)
            until_end = "" if run_left is None else f"{format_duration(run_left)} until the end"
            if postfix := ", ".join(filter(None, (text or _status.get()(), until_end))):
                bar.set_postfix_str(postfix, refresh=False)

        yield step
