"""Items of work whose results are in the journal, or are measured and put there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from calibrate.journal import Journal, taken_on
from calibrate.work.executor import Executor, Item
from calibrate.work.items import WorkItem

WRITE = 1.0  # seconds of measuring after which results are written: a commit waits for the disk


def measured(items: Sequence[WorkItem], executor: Executor, journal: Journal | None) -> list[Any]:
    """The results of some items, in their order: from the journal, or measured and put into it.

    Args:
        items: what to measure.
        executor: who measures.
        journal: where results are kept, and found again; None if nowhere.

    Raises:
        ModelError: inf or NaN came up.
        ResourceError: The GPU's memory ran out, or the journal cannot be written.
    """
    return Measuring(items, executor, journal).results()


def unmeasured(items: Sequence[Item], executor: Executor, journal: Journal) -> list[Item]:
    """The items whose results the journal does not have."""
    return [item for item in items if journal.get(item.kind, _key(item, executor)) is None]


class Measuring:
    """Items that are in the journal, or on their way: an executor may run them before the results are asked for.

    Args:
        items: of one kind.
        executor, journal: as `measured` takes them.
    """

    def __init__(self, items: Sequence[WorkItem], executor: Executor, journal: Journal | None) -> None:
        self._journal = journal
        self._entries = [(item.kind, _key(item, executor)) for item in items]
        self._results = [None if journal is None else journal.get(*entry) for entry in self._entries]
        self._pending = {
            number: executor.submit(item) for number, item in enumerate(items) if self._results[number] is None
        }

    def results(self) -> list[Any]:
        """The results, in the items' order, as a journal gives them back."""
        unwritten: dict[int, Any] = {}
        begun = time.monotonic()
        try:
            while self._pending:
                number = next(iter(self._pending))
                self._results[number] = unwritten[number] = self._pending[number].result()
                del self._pending[number]
                if time.monotonic() - begun > WRITE:
                    self._write(unwritten)
                    begun = time.monotonic()
        finally:
            self._write(unwritten)
        return self._results

    def _write(self, results: dict[int, Any]) -> None:
        if self._journal is not None and results:
            kind = self._entries[0][0]
            self._journal.put_all(kind, [(self._entries[number][1], value) for number, value in results.items()])
            for number in results:
                self._results[number] = self._journal.get(*self._entries[number])
        results.clear()


def _key(item: WorkItem, executor: Executor) -> dict[str, Any]:
    return {**item.key, **(taken_on(executor.device) if item.timed else {})}
