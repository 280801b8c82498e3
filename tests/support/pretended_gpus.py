"""Dask workers on the CPU that say they have a GPU, make up what is timed there, and write down what they ran."""

import os
from dataclasses import asdict, dataclass, replace

from calibrate.curves.ranking_cost import RankingCost
from calibrate.proof.layers import Step
from calibrate.proof.verify import LayerTime
from calibrate.search.choose import CallTime
from calibrate.search.crossover import Crossovers
from calibrate.search.tiles import Compilation, TileTime
from calibrate.timing import Timing
from calibrate.work.cluster import S2OWorker
from s2o_runtime.devices import DeviceIdentity

NAME, RAN = "S2O_TEST_GPU", "S2O_TEST_RAN"  # environment variables of the workers
GPUS = {
    "H200": DeviceIdentity("cuda", "NVIDIA H200", (9, 0), 132, 140 << 30),
    "L40S": DeviceIdentity("cuda", "NVIDIA L40S", (8, 9), 142, 44 << 30),
}
UNIT = {"H200": 1.0, "L40S": 1000.0}  # seconds; what is timed takes at least one and at most ten
FAST_ROWS = {"H200": 128, "L40S": 64}  # `block_m` of the only tiles that are worth trials


@dataclass(frozen=True)
class Ran:
    """An item that was run: its type, on which GPU, whether it is timed, and the rows of the tile that it ran."""

    item: str
    gpu: str
    timed: bool
    rows: int


class PretendingWorker(S2OWorker):
    """Its GPU's name is in the environment."""

    def info(self):
        return replace(super().info(), device=GPUS[os.environ[NAME]])

    def run(self, item):
        gpu = os.environ[NAME]
        with open(os.environ[RAN], "a") as file:
            file.write(f"{type(item).__name__},{gpu},{int(item.timed)},{rows_of(item)}\n")
        return made_up(item, gpu) if item.timed else super().run(item)


def rows_of(item):
    """`block_m` of the tile that an item runs; 0 if it runs none."""
    if isinstance(item, Step):
        return item.runs.config.tile.block_m
    return item.config.tile.block_m if isinstance(item, CallTime) else 0


def made_up(item, gpu):
    """A time that tells which GPU it is of."""
    unit = UNIT[gpu]
    if isinstance(item, TileTime):
        return unit * (1 if item.tile.block_m == FAST_ROWS[gpu] and not item.tile.specialized else 2), ""
    if isinstance(item, Compilation):
        return None
    if isinstance(item, CallTime):
        return asdict(Timing(2 * unit, unit, 3 * unit, 4 * unit, 7))
    if isinstance(item, Crossovers):
        return [(int(unit), 16) for _ in item.cases]
    if isinstance(item, LayerTime):
        return {"patched": 2 * unit, "dense": 4 * unit, "attention": [unit, 2 * unit]}
    assert isinstance(item, RankingCost)
    return 0.01


def ran(path):
    """What all workers ran, in the order in which they began."""
    fields = [line.split(",") for line in path.read_text().splitlines()]
    return [Ran(item, gpu, timed == "1", int(rows)) for item, gpu, timed, rows in fields]
