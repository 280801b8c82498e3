"""A search's choice keeps its promises; points that cannot run are counted and left out."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
import torch
from triton.runtime.errors import OutOfResources

from calibrate.curves.curves import Shape, compute_row_errors, tile_worst, unpack
from calibrate.curves.measure import combine_prompts, measure_prompt
from calibrate.model.layers import Captured
from calibrate.recipe import Recipe
from calibrate.search import study
from calibrate.search.choice import CalibrationDense, LayerBudget, SearchPoint, build_plan
from calibrate.search.study import LayerSearch, Studies
from calibrate.timing import Timing
from s2o_runtime.config import TileConfig
from s2o_runtime.errors import ConfigError, ResourceError
from s2o_runtime.reference.attention import s2o_attention_reference
from s2o_runtime.reference.dense import exact_attention
from support.marks import all_but_first

SLOW = pytest.mark.slow(reason="measures curves of more prompts, or searches many times")

SEGMENTS = (128, 256, 384)
TILES = (TileConfig(64, 64, 2), TileConfig(128, 64, 2), TileConfig(64, 64, 4), TileConfig(128, 64, 4))
POINTS = {SearchPoint(*point) for point in itertools.product(SEGMENTS, TILES)}
DEFAULT = SearchPoint(256, TILES[0])
ALL = len(POINTS)


def make_prompts(count=2, length=768):
    generator = torch.Generator().manual_seed(0)

    def randn(heads, rows):
        return torch.randn(1, heads, rows, 16, generator=generator)

    return [
        Captured(randn(2, length) + 3 * randn(2, 1), randn(1, length), randn(1, length), 0.25) for _ in range(count)
    ]


def recipe(kind="rel_mse", value=1e-2, **changes):
    options = {"model": "demo", f"budget_{kind}": value, "lengths": (768,), "out": Path("unused"), "trials": 8}
    return Recipe.from_options(options | {"segments": SEGMENTS} | changes)


def measured(prompts, **changes):
    shapes = sorted({Shape.from_tile(tile) for tile in TILES}, key=str)
    return unpack(combine_prompts([measure_prompt(prompt, shapes, recipe(**changes)) for prompt in prompts]))


@pytest.fixture(scope="module")
def curves():
    return measured(make_prompts(1))


def make_search(curves, timer=None, **changes):
    made = recipe(**changes)
    return LayerSearch(0, 768, curves, LayerBudget.from_recipe(curves, made), made, TILES, timer)


def run(search, out_of_time=lambda: False):
    """The choice; every trial was reported."""
    steps = []
    choice = search.run(Studies(search.recipe, "demo", "cpu"), lambda: steps.append(1), out_of_time)
    assert len(steps) == search.trials
    return choice


def attend(prompt, config):
    """A prompt's output with a configuration by the reference, and the exact one."""
    qkv = prompt.q, prompt.k, prompt.v
    return s2o_attention_reference(*qkv, config, scale=prompt.scale).out, exact_attention(*qkv, scale=prompt.scale)


@pytest.fixture
def every_point(monkeypatch):
    """Every point may win, whatever is predicted of it."""
    monkeypatch.setattr(study, "MAX_PREDICTED_COST", math.inf)


@pytest.mark.parametrize(("kind", "value"), all_but_first([("rel_mse", 1e-2), ("mse", 1e-3)], SLOW))
@pytest.mark.parametrize("count", all_but_first([1, 2], SLOW))
def test_the_chosen_configuration_keeps_its_promises(kind, value, count, every_point):
    prompts = make_prompts(count)
    search = make_search(measured(prompts), kind=kind, value=value, trials=12)
    choice = run(search)
    assert set(search.tried) == POINTS
    assert choice.allocation.cost == min(tried.allocation.cost for tried in search.tried.values()) < 0.95
    assert choice.why_dense is None
    assert choice.allocation.density < choice.allocation.cost
    errors, powers = [], []
    for prompt in prompts:
        out, truth = attend(prompt, choice.config)
        errors.append(float((out - truth).square().mean()))
        powers.append(float(truth.square().mean()))
        worst = tile_worst(compute_row_errors(out, truth), choice.point.tile.block_m)[0]
        assert float(worst.quantile(0.9, dim=-1).max()) <= 0.5  # few tiles: their 0.99 quantile is above this one
    promised = choice.allocation.mse
    assert count > 1 or errors[0] == pytest.approx(promised, rel=1e-3)
    assert sum(errors) / count <= promised * 1.001  # of several prompts the mean and one deviation
    assert 0 < sum(errors) / (sum(powers) if kind == "rel_mse" else count) <= search.recipe.margin * value


@pytest.mark.parametrize("trials", [1, 6, 15])
@pytest.mark.parametrize("worth_a_trial", [ALL // 2, ALL])
def test_the_default_comes_first_and_then_the_points_by_predicted_cost(trials, worth_a_trial, curves, monkeypatch):
    """As many as there are trials for; points that are predicted to be much slower get none."""
    budget = LayerBudget.from_recipe(curves, recipe())
    predicted = {point: build_plan(point, curves, budget).cost for point in POINTS}
    limit = sorted(predicted.values())[worth_a_trial - 1]
    monkeypatch.setattr(study, "MAX_PREDICTED_COST", limit / min(predicted.values()) * (1 + 1e-9))
    search = make_search(curves, trials=trials)
    choice = run(search)
    first, *others = search.tried
    assert first == DEFAULT
    costs = [predicted[point] for point in others]
    assert costs == sorted(costs)
    candidates = {DEFAULT} | {point for point, cost in predicted.items() if cost <= limit}
    assert set(search.tried) <= candidates
    assert len(search.tried) == min(trials, len(candidates))
    untried = [predicted[point] for point in candidates - set(search.tried)]
    assert max(costs, default=0.0) <= min(untried, default=math.inf)
    assert choice.cost == min(predicted[point] for point in search.tried)


def seconds_of(config):
    """Made up, different for every point; the third tile with small segments is the quickest."""
    index = 4 * TILES.index(config.tile) + SEGMENTS.index(config.heads[0].segment)
    return (index - 8) ** 2 / 100 + 0.01 + index / 1e5


def test_on_a_gpu_time_decides(curves, every_point):
    search = make_search(curves, lambda config: Timing(seconds_of(config), 1.0), trials=30)
    choice = run(search)
    assert choice.seconds == choice.timing.seconds == min(seconds_of(tried.config) for tried in search.tried.values())
    assert (choice.point, choice.why_dense) == (SearchPoint(128, TILES[2]), None)
    cheapest = min(search.tried.values(), key=lambda tried: tried.allocation.cost)
    assert cheapest.point != choice.point  # what is predicted would have chosen another


def test_a_neighbours_best_point_is_taken_with_ones_own_budget_and_what_is_slow_is_dense(curves):
    """Whatever it is: cheaper points are not looked for."""
    point, slow = SearchPoint(128, TILES[1]), make_search(curves, lambda *_: Timing(0.0015, 0.001))
    choice = make_search(curves).apply_point(point)
    assert choice.point == point
    assert choice.config == build_plan(point, curves, LayerBudget.from_recipe(curves, recipe())).config
    budget = recipe().budget.value * recipe().margin * next(iter(curves.values())).dense_power
    assert choice.allocation.mse <= choice.budget.mse == pytest.approx(budget)
    for choice, at in ((slow.apply_point(point), point), (run(slow), DEFAULT)):
        assert (choice.point, choice.dense_sentence) == (at, "1.50 ms against 1.00 ms dense")
        assert (choice.config.is_dense, choice.allocation.mse) == (True, 0.0)
        assert choice.seconds == 0.001  # what dense attention takes, not what lost against it


@pytest.mark.parametrize("runs", [TILES[1], None], ids=["one tile runs", "none runs"])
@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (RuntimeError("CUDA error: too many\nfurther advice"), "CUDA error: too many"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "CUDA out of memory. Tried"),
        (OutOfResources(9, 5, "shared memory"), "out of resource: shared memory, Required: 9, Hardware limit: 5"),
        (KeyError("a bug"), None),
        (ResourceError("a bug"), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failures_are_counted_by_reason_unless_they_are_bugs(failure, why, runs, curves, every_point, caplog):
    def timer(config):
        if config.tile != runs:
            raise failure
        return Timing(0.5, 1.0)

    search = make_search(curves, timer, trials=20)
    if why is None:
        with pytest.raises(type(failure), match="a bug"):
            run(search)
        return
    choice = run(search)
    assert {point.tile for point in search.tried} == ({runs} if runs else set())
    ((text, count),) = search.failures.items()
    assert text.startswith(why)
    assert (count, search.trials) == (9 if runs else ALL, ALL)
    assert why in caplog.text
    if runs:
        assert choice.point.tile == runs
    else:
        assert (choice.point, choice.why_dense) == (DEFAULT, CalibrationDense.NO_TRIAL)
        assert (choice.config.is_dense, choice.allocation.mse, choice.allocation.cost) == (True, 0.0, 1.0)


def test_an_error_outside_the_timed_call_is_not_a_failed_trial(curves, monkeypatch):
    """Whatever its type: a GPU that cannot run a tile raises a RuntimeError, and so may a bug."""

    def broken(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(study, "build_plan", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        run(make_search(curves, lambda config: Timing(0.5, 1.0)))


@pytest.mark.parametrize(("checks", "expected"), [(0, 1), (4, 5), (99, 8)])
def test_a_time_limit_stops_a_search_that_has_had_one_trial(checks, expected, curves, every_point):
    left, search = iter([False] * checks), make_search(curves)
    assert not run(search, out_of_time=lambda: next(left, True)).config.is_dense
    assert search.trials == expected


@pytest.mark.slow(reason="a search with a storage")
def test_a_storage_keeps_every_trial_with_its_heads(curves, tmp_path, every_point):
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    kept_in = recipe(segments=SEGMENTS[:2], trials=4, storage=url)
    budget = LayerBudget.from_recipe(curves, kept_in)
    recipes = kept_in, replace(kept_in, storage=None)
    searches = [LayerSearch(0, 768, curves, budget, one, TILES[:2]) for one in recipes]
    choice, in_memory = (search.run(Studies(search.recipe, "demo", "NVIDIA H200")) for search in searches)
    assert choice.config == in_memory.config  # that it is kept changes nothing
    (name,) = optuna.get_all_study_names(storage=url)
    assert name.startswith("demo, NVIDIA H200, rel-mse-0.01, 768 tokens, layer 0 (")
    kept = optuna.load_study(study_name=name, storage=url)
    assert (len(kept.trials), kept.best_value) == (4, choice.cost)
    by_params = {(point.segment, str(point.tile)): tried for point, tried in searches[0].tried.items()}
    for trial in kept.trials:
        tried, attributes = by_params[trial.params["segment"], trial.params["tile"]], trial.user_attrs
        assert (trial.value, attributes["layer"], attributes["length"]) == (tried.cost, 0, 768)
        columns = zip(*(attributes[name] for name in ("density", "error", "mode", "tau")), strict=True)
        assert list(columns) == [
            (point.density, point.mse, point.head.mode, None if point.head.mode == "dense" else point.head.tau)
            for point in tried.allocation.points
        ]


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("nonsense", ConfigError),
        ("none://user:secret@host/db", ConfigError),
        ("sqlite:////proc/none/studies.db", ResourceError),
    ],
)
def test_a_storage_that_cannot_be_opened_is_one_sentence_without_its_password(url, error):
    with pytest.raises(error, match="--storage") as raised:
        Studies(recipe(storage=url), "demo", "cpu")
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_layer_that_its_budget_makes_dense_says_so(curves):
    plan = build_plan(DEFAULT, curves, LayerBudget.from_recipe(curves, recipe(value=1e-30)))
    assert plan.why_dense is None  # nothing made it dense but its budget
    assert plan.dense_sentence == CalibrationDense.NO_GAIN.value


def test_the_lookback_is_chosen_as_time_says_and_keeps_its_promise(every_point):
    prompt, lookbacks = make_prompts(1), (128, 256)
    both = measured(prompt, lookbacks=lookbacks)
    for faster in lookbacks:

        def timer(config, faster=faster):
            return Timing(seconds_of(config) * (1 + (config.lookback != faster)), 1e9)

        search = make_search(both, timer, trials=30, lookbacks=lookbacks)
        choice = run(search)
        assert search.trials == 2 * ALL
        assert choice.config.lookback == choice.point.lookback == faster
        out, truth = attend(prompt[0], choice.config)
        assert float((out - truth).square().mean()) == pytest.approx(choice.allocation.mse, rel=1e-2)
