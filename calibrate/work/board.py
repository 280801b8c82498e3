"""Which worker runs which item next: plain bookkeeping, without processes, clocks or a network.

Items lie in lanes. A lane belongs to one worker, because there each item goes on where the one before ended. A worker
takes from its own lanes first, then lanes that belong to nobody; one that has nothing left takes the end of a track,
or a lane that waits, from the worker that has most. So nobody waits while there is work, and a worker that is late,
slow or gone changes only who does what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from calibrate.work.items import WorkItem

WALK = 0.1  # the time of moving through a layer, over that of measuring it (docs/scaling.md)
AHEAD = 2  # items that a worker has at a time: one runs, one waits beside it

Worker = Hashable
Target = Hashable  # the kind of GPU that items are run for
May = Callable[[WorkItem, Target], bool]  # whether a worker may run an item for a target


@dataclass(eq=False)
class Entry:
    """An item on the board.

    number: in the order of submission. target: what it is run for. tries: how often a worker that had it was lost or
    failed.
    """

    item: WorkItem
    number: int
    lane: Lane
    target: Target
    tries: int = 0


@dataclass(eq=False)
class Lane:
    """Items that had better run on one worker, in their order. Whoever may run one of them may run all.

    Attributes:
        entries: those that wait.
        owner: the worker that it belongs to; None for nobody.
        running: how many of its items are with a worker.
        track: whether any worker may begin anywhere in it, if it moves there first.
        sticky: whether to go on elsewhere costs all that came before.
    """

    track: bool = False
    sticky: bool = False
    entries: deque[Entry] = field(default_factory=deque)
    owner: Worker | None = None
    running: int = 0
    begin: int = 0  # how many of a track's items are before this lane


class Board:
    """Items that wait, and the workers that there are."""

    def __init__(self) -> None:
        self._workers: dict[Worker, May] = {}
        self._lanes: list[Lane] = []
        self._by_affinity: dict[Hashable, Lane] = {}
        self._number = 0
        self._stage = ""

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers)

    @property
    def waiting(self) -> int:
        """How many items wait."""
        return sum(len(lane.entries) for lane in self._lanes)

    def join(self, worker: Worker, may: May) -> None:
        """A worker that takes the items that it may run from now on."""
        self._workers[worker] = may

    def leave(self, worker: Worker, running: Iterable[Entry] = ()) -> None:
        """A worker that is gone. running: the items that it had, which wait again."""
        self._workers.pop(worker, None)
        for entry in reversed(list(running)):
            self.put_back(entry)
        for lane in self._lanes:
            if lane.owner == worker:
                lane.owner = None
        for lane in self._lanes:
            if lane.sticky and lane.owner is None and lane.entries:
                self._give(lane)

    def add(self, item: WorkItem, target: Target = None) -> Entry:
        """An item that waits from now on, to be run for a target."""
        if item.stage != self._stage:
            self._stage = item.stage
            self._forget_finished()
        lane = self._by_affinity.get((item.stage, target, item.affinity)) if item.affinity is not None else None
        if lane is None:
            lane = Lane(sticky=bool(getattr(item, "sticky", False)))
            self._lanes.append(lane)
            if item.affinity is not None:
                self._by_affinity[item.stage, target, item.affinity] = lane
        entry = self._append(lane, item, target)
        if lane.sticky and lane.owner is None and not lane.running:
            self._give(lane)
        return entry

    def add_track(self, items: Sequence[WorkItem], target: Target = None) -> list[Entry]:
        """Items of which any worker may take neighbours."""
        self._forget_finished()
        lane = Lane(track=True)
        self._lanes.append(lane)
        return [self._append(lane, item, target) for item in items]

    def take(self, worker: Worker) -> Entry | None:
        """What a worker runs next; None if there is nothing for it."""
        lane = self._own(worker) or self._unowned(worker) or self._taken_over(worker)
        if lane is None:
            return None
        lane.owner = worker
        lane.running += 1
        lane.begin += lane.track
        return lane.entries.popleft()

    def done(self, entry: Entry) -> None:
        """An item that a worker finished or gave up for good."""
        entry.lane.running -= 1
        if entry.item.affinity is None and entry.lane in self._lanes and not entry.lane.track:
            self._lanes.remove(entry.lane)

    def put_back(self, entry: Entry) -> None:
        """An item whose worker failed: it waits again, before the others of its lane."""
        lane = entry.lane
        lane.running -= 1
        lane.owner = None
        lane.begin -= lane.track
        lane.entries.appendleft(entry)

    def stranded(self) -> set[Target]:
        """The targets for which items wait that no worker may run."""
        return {
            lane.entries[0].target
            for lane in self._lanes
            if lane.entries and not any(self._may(worker, lane) for worker in self._workers)
        }

    def drop(self, target: Target) -> None:
        """Forget what waits for a target."""
        for lane in self._lanes:
            if lane.entries and lane.entries[0].target == target:
                lane.entries.clear()

    def _append(self, lane: Lane, item: WorkItem, target: Target) -> Entry:
        self._number += 1
        entry = Entry(item, self._number, lane, target)
        lane.entries.append(entry)
        return entry

    def _give(self, lane: Lane) -> None:
        """Give a lane that is not to move to the worker with the fewest such lanes, of those that may run it."""
        counts = {worker: 0 for worker in self._workers if self._may(worker, lane)}
        for other in self._lanes:
            if other.sticky and other.owner in counts:
                counts[other.owner] += 1
        lane.owner = min(counts, key=counts.__getitem__, default=None)

    def _own(self, worker: Worker) -> Lane | None:
        return _first(lane for lane in self._lanes if lane.owner == worker and lane.entries)

    def _unowned(self, worker: Worker) -> Lane | None:
        return _first(lane for lane in self._lanes if lane.owner is None and lane.entries and self._may(worker, lane))

    def _taken_over(self, worker: Worker) -> Lane | None:
        """The end of the longest track, or a lane that waits for a worker that is at another."""
        tracks = [lane for lane in self._lanes if lane.track and lane.entries and self._may(worker, lane)]
        longest = max(tracks, key=lambda lane: _work(lane.entries), default=None)
        if longest is not None and (taken := _end_of(longest)):
            lane = Lane(track=True, begin=longest.begin + len(longest.entries))
            lane.entries.extend(taken)
            for entry in taken:
                entry.lane = lane
            self._lanes.append(lane)
            return lane
        return _first(
            lane
            for lane in self._lanes
            if not (lane.track or lane.sticky or lane.running) and lane.entries and self._may(worker, lane)
        )

    def _may(self, worker: Worker, lane: Lane) -> bool:
        may = self._workers.get(worker)
        return may is not None and may(lane.entries[0].item, lane.entries[0].target)

    def _forget_finished(self) -> None:
        """Forget lanes in which nothing waits or runs; those of another stage are not gone on with."""
        self._lanes = [lane for lane in self._lanes if lane.entries or lane.running]
        kept = set(map(id, self._lanes))
        self._by_affinity = {name: lane for name, lane in self._by_affinity.items() if id(lane) in kept}


def _first(lanes: Iterable[Lane]) -> Lane | None:
    """The lane whose next item was submitted first."""
    return min(lanes, key=lambda lane: lane.entries[0].number, default=None)


def _work(entries: Iterable[Entry]) -> float:
    """The work in some items of a track, as far as it can be told: attention grows with the square of the length."""
    return sum(float(getattr(entry.item, "length", 1)) ** 2 for entry in entries)


def _end_of(lane: Lane) -> list[Entry]:
    """The end of a track that another worker takes, so that both are ready together; empty if that gains nothing.

    The other one has to move past everything before it, in `WALK` of the time that measuring takes.
    """
    begin, waiting = lane.begin, len(lane.entries)
    end = begin + waiting
    if lane.owner is None:
        return []
    cut = round((end + begin) / (2 - WALK))
    if cut >= end or WALK * cut + end - cut > waiting + lane.running:
        return []
    kept = max(0, cut - begin)
    taken: list[Any] = [lane.entries.pop() for _ in range(waiting - kept)]
    return taken[::-1]
