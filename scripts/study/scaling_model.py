"""A model of how calibration scales, and simulations that check what it says of scheduling.

Three statements of the same number, the seconds that measuring takes with so many workers:

  model       docs/scaling.md's formula, which knows no queue and no whole layers
  board       the scheduler's own bookkeeping (calibrate/work/board.py) on a clock that jumps from event to event
  sleeping    real Dask workers that sleep instead of measuring, as threads of this process, on the wall clock

Each is of a model with so many layers, prompts at one length, and seconds for a layer and prompt. A worker that begins
in the middle moves there first, in `WALK` of the time that measuring takes.
"""

from __future__ import annotations

import heapq
import json
import sys
import time
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from calibrate.recipe import Recipe
from calibrate.versions import now
from calibrate.work.board import AHEAD, WALK, Board, Entry
from calibrate.work.cluster import ClusterExecutor, Hello, S2OWorker
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.identity import Geometry
from scripts.bench.common import bench_parser, check_least, int_list, run_command

CPU = DeviceIdentity("cpu", "cpu")


@dataclass(frozen=True)
class Case:
    """What is measured. seconds: of one layer on one prompt."""

    name: str
    layers: int
    prompts: int
    seconds: float


CASES = (
    Case("7B, 8 x 32768", 28, 8, 0.42),
    Case("70B, 8 x 131072", 80, 8, 16.0),
)


def predicted(case: Case, workers: int) -> float:
    """The formula: prompts are shared out first; workers that share a prompt's layers each move to their first one."""
    tracks = min(workers, case.prompts)
    per_track = workers / tracks
    of_layer = case.seconds * case.prompts / tracks
    return float(of_layer * case.layers * WALK / (1 - (1 - WALK) ** per_track))


@dataclass(frozen=True)
class Sleep:
    """A layer of one track, which sleeps instead of being measured."""

    track: int
    layer: int
    seconds: float
    affinity: Hashable = None
    stage: str = "sleep"
    timed: bool = False
    length: int = 1

    def lasts(self, kept: dict[Any, int]) -> float:
        """The seconds that it takes a worker which is where `kept` says; that is changed."""
        at = kept.get(self.track, 0)
        at = at if at <= self.layer else 0
        kept[self.track] = self.layer + 1
        return self.seconds * (1 + WALK * (self.layer - at))

    def run(self, worker: Any) -> int:
        """worker: where it is in each track."""
        time.sleep(self.lasts(worker))
        return self.layer


def tracks_of(case: Case, workers: int, scale: float = 1.0) -> list[list[Sleep]]:
    """The items, as `measure_model` would submit them."""
    count = min(workers, case.prompts)
    edges = [case.prompts * number // count for number in range(count + 1)]
    return [
        [Sleep(track, layer, case.seconds * (end - begin) * scale) for layer in range(case.layers)]
        for track, (begin, end) in enumerate(pairwise(edges))
    ]


def on_the_board(case: Case, workers: int) -> float:
    """The seconds on a clock that jumps from event to event."""
    board = Board()
    for worker in range(workers):
        board.join(worker, lambda item, target: True)
    for track in tracks_of(case, workers):
        board.add_track(track)
    kept: list[dict[Any, int]] = [{} for _ in range(workers)]
    queues: list[list[Entry]] = [[] for _ in range(workers)]
    ends: list[tuple[float, int]] = []
    clock = 0.0

    def feed() -> None:
        for ahead in range(1, AHEAD + 1):
            for worker, queue in enumerate(queues):
                if len(queue) < ahead and (entry := board.take(worker)) is not None:
                    queue.append(entry)
                    if len(queue) == 1:
                        start(worker)

    def start(worker: int) -> None:
        item = queues[worker][0].item
        assert isinstance(item, Sleep)
        heapq.heappush(ends, (clock + item.lasts(kept[worker]), worker))

    feed()
    while ends:
        clock, worker = heapq.heappop(ends)
        board.done(queues[worker].pop(0))
        if queues[worker]:
            start(worker)
        feed()
    return clock


class SleepingWorker(S2OWorker):
    """Has no model; what it keeps between items is where it is in each track."""

    def _loaded(self) -> Any:
        if self._state is None:
            self._hello = Hello("none", Geometry("llama", 1, 1, 1, 64), "none", CPU, {}, 0.0)
            self._state = _Walker()  # type: ignore[assignment]
        return self._state


class _Walker:
    def __init__(self) -> None:
        self._kept: dict[Any, int] = {}

    def run(self, item: Any) -> Any:
        return item.run(self._kept)


def asleep(case: Case, workers: int, scale: float) -> float:
    """The seconds that real workers sleep, over `scale`."""
    from distributed import Client, LocalCluster

    recipe = Recipe.of({"model": "none", "lengths": (1024,), "out": Path("unused"), "gpus": workers})
    with (
        LocalCluster(  # over TCP, or all workers would share one plugin
            n_workers=workers,
            processes=False,
            protocol="tcp://",
            threads_per_worker=1,
            dashboard_address=None,
            memory_limit=0,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        executor = ClusterExecutor(client, recipe, [], workers, SleepingWorker)
        begin = time.monotonic()
        done = len(list(executor.spread(tracks_of(case, workers, scale))))
        seconds = time.monotonic() - begin
        executor.close()
    assert done == case.layers * min(workers, case.prompts)
    return seconds / scale


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser, add = bench_parser("scripts.study.scaling_model", __doc__)
    parse = int_list("1,2,8,64,256")
    add("--workers", "1,2,8,64,256,1000", "for model and board", type=parse, metavar="N,N")
    add("--sleeping", "1,2,8,64,256", "with real workers that sleep", type=parse, metavar="N,N")
    add("--longest", 20.0, "seconds that one simulation with sleeping workers is to take", type=float, metavar="X")
    add("--out", Path("build/scaling-model.json"), "what is written", type=Path, metavar="FILE")
    args = parser.parse_args(argv)

    def work() -> None:
        check_least(args, 1, "longest")
        rows = []
        for case in CASES:
            alone = predicted(case, 1)
            for workers in sorted({*args.workers, *args.sleeping}):
                row = {"case": case.name, "workers": workers, "model": predicted(case, workers)}
                row["board"] = on_the_board(case, workers)
                if workers in args.sleeping:
                    row["sleeping"] = asleep(case, workers, min(1.0, args.longest / row["board"]))
                row["speedup"] = {
                    name: round(alone / seconds, 2) for name, seconds in row.items() if isinstance(seconds, float)
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
        result = {"when": now(), "walk": WALK, "cases": [asdict(case) for case in CASES], "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")

    return run_command("scripts.study.scaling_model", args.out, work, "fewer --workers")


if __name__ == "__main__":
    sys.exit(main())
