"""Items that are in the journal are not measured again, and a failure loses nothing that was measured before it."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from calibrate.work import executor as module
from calibrate.work.executor import WorkItem, find_unmeasured, measure_items
from s2o_runtime.errors import ModelError
from s2o_runtime.identity import geometry
from support.executors import GPU, pretended
from support.models import CONFIGS

GEOMETRY = geometry(CONFIGS["llama"])
RAN = []


@dataclass(frozen=True)
class Square(WorkItem):
    number: int
    stage: str = "squares"
    kind: ClassVar[str] = "square"

    @property
    def key(self):
        return {"number": self.number}

    def run(self, worker):
        RAN.append(self.number)
        if self.number < 0:
            raise ModelError("no root")
        return {"pair": (self.number, self.number**2)}


@dataclass(frozen=True)
class TimedSquare(Square):
    timed: ClassVar[bool] = True


@pytest.fixture(autouse=True)
def _nothing_ran():
    RAN.clear()


def test_what_the_journal_has_is_not_measured_again(journal):
    executor = pretended(GEOMETRY, GPU)
    expected = [{"pair": [3, 9]}, {"pair": [2, 4]}]  # as JSON gives it back, the first time too
    assert measure_items([Square(3), Square(2)], executor, journal) == expected
    assert measure_items([Square(3), Square(2)], executor, journal) == expected
    assert RAN == [3, 2]
    assert find_unmeasured([Square(3), Square(5)], executor, journal) == [Square(5)]
    assert measure_items([Square(3)], executor, None) == [{"pair": (3, 9)}]
    assert RAN == [3, 2, 3]


def test_a_time_is_of_one_gpu(journal):
    other = replace(GPU, name="another")
    for device in (GPU, other, GPU):
        measure_items([TimedSquare(3)], pretended(GEOMETRY, device), journal)
    assert RAN == [3, 3]
    assert {key["gpu"][0] for key, _ in journal.entries("square")} == {GPU.name, other.name}


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["one by one", "together"])
def test_a_failure_loses_nothing_that_was_measured_before(seconds, journal, monkeypatch):
    monkeypatch.setattr(module, "WRITE_INTERVAL_S", seconds)
    with pytest.raises(ModelError, match="no root"):
        measure_items([Square(1), Square(2), Square(-1), Square(4)], pretended(GEOMETRY, GPU), journal)
    assert [key["number"] for key in journal.keys("square")] == [1, 2]
