"""Which worker runs what next: nothing is lost, nothing runs twice, nobody waits while there is work."""

import random
from dataclasses import dataclass

import pytest

from calibrate.work.board import WALK, Board


@dataclass(frozen=True)
class Thing:
    """An item that nobody runs."""

    name: object
    affinity: object = None
    stage: str = "things"
    timed: bool = False
    sticky: bool = False
    length: int = 1


def may(time=True):
    return lambda item, target: time or not item.timed


def board(workers=2, **timing):
    made = Board()
    for worker in range(workers):
        made.join(worker, may(timing.get(f"w{worker}", True)))
    return made


def names(entries):
    return [entry.item.name for entry in entries]


def drain(made, worker):
    """What one worker takes if it is alone from now on."""
    taken = []
    while (entry := made.take(worker)) is not None:
        taken.append(entry)
        made.done(entry)
    return taken


def test_items_without_affinity_go_to_whoever_asks_in_their_order():
    made = board()
    for name in range(5):
        made.add(Thing(name))
    assert names([made.take(0), made.take(1), made.take(1), made.take(0)]) == [0, 1, 2, 3]
    assert names(drain(made, 1)) == [4]
    assert made.take(0) is None


def test_what_continues_goes_to_the_same_worker():
    made = board()
    for affinity in "ab":
        made.add(Thing(f"{affinity}0", affinity))
    first, second = made.take(0), made.take(1)
    for entry in (first, second):
        made.done(entry)
    for affinity in "ba":
        made.add(Thing(f"{affinity}1", affinity))
    assert names([made.take(0), made.take(1)]) == ["a1", "b1"]


def test_lanes_that_are_not_to_move_are_dealt_evenly_and_stay():
    made = board(3)
    for prompt in range(8):
        made.add(Thing(prompt, prompt, sticky=True))
    shares = [names(drain(made, worker)) for worker in range(3)]
    assert shares == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_a_track_is_shared_where_both_are_ready_together():
    made = board()
    made.add_track([Thing(layer) for layer in range(28)])
    entry = made.take(0)
    stolen = made.take(1)
    begin = stolen.item.name
    assert begin == pytest.approx(28 / (2 - WALK), abs=1)
    assert WALK * begin + 28 - begin == pytest.approx(begin, abs=1)
    made.done(entry)
    made.done(stolen)
    assert names(drain(made, 0))[: begin - 1] == list(range(1, begin))


def test_two_tracks_are_for_two_workers_from_their_beginnings():
    made = board()
    for track in "ab":
        made.add_track([Thing(f"{track}{layer}") for layer in range(3)])
    assert names([made.take(0), made.take(1), made.take(0), made.take(1)]) == ["a0", "b0", "a1", "b1"]


def test_the_end_of_a_track_is_left_where_getting_there_takes_longer():
    made = board()
    made.add_track([Thing(layer) for layer in range(28)])
    for _ in range(26):
        made.done(made.take(0))
    made.take(0)
    assert made.take(1) is None  # to move past 27 layers takes longer than to wait for one


def test_times_are_for_the_target_kind_only():
    made = board(2, w1=False)
    made.add(Thing("time", timed=True))
    made.add(Thing("error"))
    made.add_track([Thing(f"time {layer}", timed=True) for layer in range(3)])
    assert names([made.take(1)]) == ["error"]
    assert made.take(1) is None
    assert names(drain(made, 0)) == ["time", "time 0", "time 1", "time 2"]


def test_each_item_is_for_a_target_and_runs_where_that_may_run():
    """Two kinds of GPU: lanes of one affinity are apart, and what nobody may run is known."""
    made = Board()
    for kind in "ab":
        made.join(kind, lambda item, target, kind=kind: target == kind or not item.timed)
    for target in "ab":
        made.add(Thing(f"time for {target}", "prompt", timed=True, sticky=True), target)
        made.add(Thing(f"error for {target}", "layer"), target)
    assert not made.stranded()
    assert [made.take("b").item.name for _ in range(2)] == ["time for b", "error for a"]
    made.leave("b")
    assert made.stranded() == set()
    made.add(Thing("another time for b", timed=True), "b")
    assert made.stranded() == {"b"}
    assert names(drain(made, "a")) == ["time for a", "error for b"]
    made.drop("b")
    assert made.stranded() == set()
    assert made.waiting == 0


def test_what_a_lost_worker_had_is_run_by_another_first():
    made = board()
    for prompt in range(4):
        made.add(Thing(prompt, prompt, sticky=True))
    running = [made.take(0), made.take(1)]
    made.leave(1, running[1:])
    made.done(running[0])
    assert names(drain(made, 0)) == [1, 2, 3]


def test_a_late_worker_takes_the_end_of_what_is_left():
    made = board(1)
    made.add_track([Thing(layer) for layer in range(20)])
    made.take(0)
    made.join("late", may())
    assert made.take("late").item.name > 9


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_every_item_is_done_once(seed):
    """Workers join, die and work at random; items of all kinds come at random."""
    rng = random.Random(seed)
    made, alive, running, done, added = Board(), set(), {}, [], 0
    for step in range(600):
        event = rng.random()
        if event < 0.03 or not alive:
            alive.add(step)
            made.join(step, may(rng.random() < 0.7))
            running[step] = []
        elif event < 0.05:
            dead = rng.choice(sorted(alive))
            alive.remove(dead)
            made.leave(dead, running.pop(dead))
        elif event < 0.25 and step < 400:
            kind = rng.choice(["free", "sticky", "lane", "track"])
            count = rng.randint(1, 9) if kind == "track" else 1
            things = [
                Thing(
                    added + i, rng.randint(0, 9) if kind in ("sticky", "lane") else None, kind, sticky=kind == "sticky"
                )
                for i in range(count)
            ]
            added += count
            if kind == "track":
                made.add_track(things)
            else:
                made.add(things[0])
        else:
            worker = rng.choice(sorted(alive))
            if running[worker] and rng.random() < 0.6:
                entry = running[worker].pop(0)
                made.done(entry)
                done.append(entry.item.name)
            elif (entry := made.take(worker)) is not None:
                running[worker].append(entry)
    for worker in alive:
        for entry in running[worker]:
            made.done(entry)
            done.append(entry.item.name)
    made.join("last", may())
    for worker in alive:
        made.leave(worker)
    done += names(drain(made, "last"))
    assert sorted(done) == list(range(added))
    assert made.waiting == 0
