"""What a study chooses does what it promises; what it cannot run is counted and left out."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

from calibrate.capture import Captured
from calibrate.curves import Method, Shape, unpacked
from calibrate.measure import _measured
from calibrate.recipe import Recipe
from calibrate.search import Study, allowed
from calibrate.timing import Timing
from calibrate.worst import row_errors, tile_worst
from s2o_runtime.config import TileConfig
from s2o_runtime.dense import exact_attention
from s2o_runtime.errors import ConfigError
from s2o_runtime.reference import s2o_attention_reference

SEGMENTS, GRAINS = (128, 256), (2, 4)
TILES = (TileConfig(64, 64, 2), TileConfig(128, 64, 2), TileConfig(64, 64, 4))
PLACES = set(itertools.product(SEGMENTS, GRAINS, TILES))
DEFAULT = (256, 4, TILES[0])


def make_prompts(count=2, length=768):
    generator = torch.Generator().manual_seed(0)

    def randn(heads, rows):
        return torch.randn(1, heads, rows, 16, generator=generator)

    return [
        Captured(randn(2, length) + 3 * randn(2, 1), randn(1, length), randn(1, length), 0.25) for _ in range(count)
    ]


def recipe(kind="rel_mse", value=1e-2, **changes):
    options = {"model": "demo", f"budget_{kind}": value, "lengths": (768,), "out": Path("unused"), "trials": 8}
    return Recipe.of(options | {"segments": SEGMENTS, "grains": GRAINS, "representatives": (1, 4)} | changes)


def measured(prompts):
    shapes = sorted({Shape.of(tile) for tile in TILES}, key=str)
    return unpacked(_measured(iter(prompts), shapes, recipe()))


@pytest.fixture(scope="module")
def curves():
    return measured(make_prompts(1))


def study(curves, timer=None, **changes):
    return Study(curves, recipe(**changes), SEGMENTS, TILES, timer)


def run(of, seed=0, start_from=(), out_of_time=lambda: False):
    steps = []
    return of.run(seed, start_from, lambda: steps.append(1), out_of_time), len(steps)


@pytest.mark.parametrize(("kind", "value"), [("rel_mse", 1e-2), ("mse", 1e-3)])
@pytest.mark.parametrize("count", [1, 2])
def test_the_chosen_configuration_keeps_its_promises(kind, value, count):
    prompts = make_prompts(count)
    work = study(measured(prompts), kind=kind, value=value, trials=12)
    choice, steps = run(work)
    assert steps == work.trials == 12
    assert set(work.tried) <= PLACES
    assert choice.allocation.cost == min(tried.allocation.cost for tried in work.tried.values()) < 0.95
    assert choice.place in work.tried
    assert choice.why_dense is None
    assert choice.allocation.density < choice.allocation.cost
    errors, powers = [], []
    for prompt in prompts:
        out, _, _ = s2o_attention_reference(prompt.q, prompt.k, prompt.v, choice.config, scale=prompt.scale)
        truth = exact_attention(prompt.q, prompt.k, prompt.v, scale=prompt.scale)
        errors.append(float((out - truth).square().mean()))
        powers.append(float(truth.square().mean()))
        worst = tile_worst(row_errors(out, truth), choice.tile.block_m)[0]
        assert float(worst.quantile(0.9, dim=-1).max()) <= 0.5  # few tiles: their 0.99 quantile is above this one
    promised = choice.allocation.mse
    if count == 1:
        assert errors[0] == pytest.approx(promised, rel=1e-3)
    assert sum(errors) / count <= promised * 1.001  # of several prompts the mean and one deviation
    spent = sum(errors) / (sum(powers) if kind == "rel_mse" else count)
    assert 0 < spent <= 0.8 * value  # the margin


def test_another_budget_changes_the_heads_and_nothing_else(curves):
    choice, _ = run(study(curves))
    tighter = choice.spending(choice.allocation.mse / 2, allowed(recipe()))
    assert tighter.place == choice.place
    assert tighter.allocation.mse <= choice.allocation.mse / 2 == tighter.budget_mse
    assert tighter.allocation.cost >= choice.allocation.cost
    same = choice.spending(choice.budget_mse, allowed(recipe()))
    assert same.config == choice.config


def test_rankings_of_the_place_only_are_chosen_from(curves):
    work = study(curves)
    for place in PLACES:
        found = work.choice(*place)
        assert set(found.curves) == {Method(place[0], count, place[1]) for count in (1, 4)}
        assert {head.segment for head in found.config.heads} == {place[0]}
        assert (found.config.grain, found.config.tile) == place[1:]


def test_the_same_seed_chooses_the_same(curves):
    first, second = (study(curves, trials=6) for _ in range(2))
    assert run(first, 3)[0].config == run(second, 3)[0].config
    assert list(first.tried) == list(second.tried)


def test_the_default_comes_first_and_then_what_was_best_for_neighbours(curves):
    neighbours = [(128, 2, TILES[2]), (128, 4, TILES[1])]
    elsewhere = [(512, 4, TILES[0]), (256, 4, TileConfig(256, 64, 2))]  # longer prompts', another GPU's
    work = study(curves, trials=3)
    run(work, start_from=[neighbours[0], *elsewhere, DEFAULT, neighbours[1]])
    assert list(work.tried) == [DEFAULT, *neighbours]


def test_a_place_is_timed_once_however_often_it_is_tried(curves):
    asked = []

    def timer(config, best):
        asked.append(config)
        return Timing(0.5, 0.5, 0.5, 1.0, 3)

    work = study(curves, timer, trials=40)
    assert run(work)[1] == 40
    assert len(asked) == len(set(asked)) == len(work.tried) <= len(PLACES)


def seconds_of(config):
    """Made up, different for every place; the last tile with small segments is the quickest."""
    place = 4 * TILES.index(config.tile) + 2 * SEGMENTS.index(config.heads[0].segment) + GRAINS.index(config.grain)
    return (place - 8) ** 2 / 100 + 0.01 + place / 1e5


def test_on_a_gpu_time_decides(curves):
    calls = []

    def timer(config, best):
        calls.append((seconds_of(config), best))
        return Timing(seconds_of(config), 0.0, 1.0, 1.0, 3)

    work = study(curves, timer, trials=30)
    choice, _ = run(work)
    assert choice.seconds == choice.timing.seconds == min(seconds_of(tried.config) for tried in work.tried.values())
    assert choice.place == (128, 2, TILES[2])
    assert choice.why_dense is None
    cheapest = min(work.tried.values(), key=lambda tried: tried.allocation.cost)
    assert cheapest.place != choice.place  # what is predicted would have chosen another
    for index, (_, best) in enumerate(calls):
        assert best == min((seconds for seconds, _ in calls[:index]), default=math.inf)


def test_a_layer_that_is_not_faster_than_dense_becomes_dense_and_says_why(curves):
    choice, _ = run(study(curves, lambda config, best: Timing(0.0015, 0.0, 1.0, 0.001, 7)))
    assert choice.config.is_dense
    assert choice.why_dense == "1.50 ms against 1.00 ms dense"
    assert choice.allocation.mse == 0.0
    assert choice.seconds == 0.001  # what dense attention takes, not what lost against it
    assert choice.place == DEFAULT


def test_a_layer_that_gains_nothing_within_its_budget_becomes_dense(curves):
    choice, _ = run(study(curves, value=1e-12))
    assert choice.config.is_dense
    assert choice.why_dense == "no head gains anything within the budget"


TOO_MUCH = "out of resource: shared memory, Required: 9, Hardware limit: 5"
FAILURES = [
    (RuntimeError("CUDA error: too many\nfurther advice"), "CUDA error: too many"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried"), "CUDA out of memory. Tried"),
    (OutOfResources(9, 5, "shared memory"), TOO_MUCH),
    (RuntimeError(), "RuntimeError"),
]


@pytest.mark.parametrize(("failure", "why"), FAILURES, ids=lambda value: type(value).__name__)
def test_what_fails_is_counted_by_its_reason_and_left_out(failure, why, curves, caplog):
    def timer(config, best):
        if config.tile != TILES[1]:
            raise failure
        return Timing(0.5, 0.5, 0.5, 1.0, 3)

    work = study(curves, timer, trials=20)
    choice, steps = run(work)
    assert choice.tile == TILES[1]
    assert {tile for _, _, tile in work.tried} == {TILES[1]}
    assert set(work.failures) == {next(iter(work.failures))}
    said, count = next(iter(work.failures.items()))
    assert said.startswith(why)
    assert 1 <= count <= steps - len(work.tried)
    assert why in caplog.text


def test_reasons_are_told_apart(curves):
    def timer(config, best):
        raise RuntimeError(str(config.tile))

    work = study(curves, timer, trials=12)
    run(work)
    assert sum(work.failures.values()) == work.trials == 12
    assert set(work.failures) <= set(map(str, TILES))


def test_all_failing_means_dense(curves):
    def timer(config, best):
        raise RuntimeError("no")

    work = study(curves, timer, trials=3)
    choice, _ = run(work)
    assert work.failures == {"no": 3}
    assert (choice.place, choice.why_dense) == (DEFAULT, "no trial ran")
    assert choice.config.is_dense
    assert (choice.allocation.mse, choice.allocation.cost) == (0.0, 1.0)


@pytest.mark.parametrize("bug", [ConfigError("a bug"), KeyError("a bug")], ids=lambda bug: type(bug).__name__)
def test_a_bug_is_not_a_failed_trial(bug, curves):
    def timer(config, best):
        raise bug

    with pytest.raises(type(bug), match="a bug"):
        run(study(curves, timer))


@pytest.mark.parametrize(("checks", "expected"), [(0, 1), (1, 2), (4, 5), (99, 8)])
def test_a_time_limit_stops_a_study_that_has_had_one_trial(checks, expected, curves):
    left = iter([False] * checks)
    work = study(curves)
    choice, steps = run(work, out_of_time=lambda: next(left, True))
    assert steps == work.trials == expected
    assert not choice.config.is_dense


def test_what_a_neighbour_found_best_is_taken_with_ones_own_budget(curves):
    """Whatever it is: cheaper places are not looked for."""
    place = (128, 2, TILES[1])
    work = study(curves)
    choice = work.adopted(place)
    assert choice.place == place
    assert choice.config == work.spent(place).config
    assert choice.allocation.mse <= choice.budget_mse == pytest.approx(
        8e-3 * next(iter(curves.values())).dense_power
    )  # fmt: skip
    slow = study(curves, lambda config, best: Timing(0.002, 0.0, 1.0, 0.001, 7)).adopted(place)
    assert (slow.place, slow.why_dense) == (place, "2.00 ms against 1.00 ms dense")


def test_a_neighbours_best_that_fails_here_means_dense(curves, caplog):
    def timer(config, best):
        raise torch.OutOfMemoryError("CUDA out of memory")

    work = study(curves, timer)
    choice = work.adopted(DEFAULT)
    assert choice.config.is_dense
    assert choice.why_dense == "CUDA out of memory"
    assert "segment 256, grain 4, 64x64x2 w8 s2 failed: CUDA out of memory" in caplog.text
