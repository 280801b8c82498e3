"""What a user sees of a long run while it goes on: a progress bar for each phase, and what each phase took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tqdm import tqdm

_status: ContextVar[Callable[[], str] | None] = ContextVar("status", default=None)


@contextmanager
def showing(status: Callable[[], str]) -> Iterator[None]:
    """Inside the block every bar shows this text behind it, such as what many workers do."""
    token = _status.set(status)
    try:
        yield
    finally:
        _status.reset(token)


class PhaseClock:
    """The seconds that each phase of a run took, by the phase's name, in the order in which they ended."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as the phase `name`."""
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start


@contextmanager
def progress_bar(description: str, total: int | None, unit: str, *, shown: bool) -> Iterator[Callable[..., None]]:
    """Show a progress bar inside the block.

    Args:
        description: What the bar counts, shown before it.
        total: How many steps there will be; None if nobody knows.
        unit: What one step is.
        shown: Whether the bar is shown at all.

    Returns:
        A function that advances the bar by one step; called with a text, it shows that text behind the bar.
    """
    with tqdm(total=total, desc=description, unit=unit, disable=not shown) as bar:

        def step(text: str = "") -> None:
            status = _status.get()
            text = text or ("" if status is None else status())
            if text:
                bar.set_postfix_str(text, refresh=False)
            bar.update()

        yield step
