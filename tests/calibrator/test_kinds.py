"""A profile for each kind of GPU in one run: the loop over the kinds, and what the command says of them.

The kinds are made up here; test_cluster.py has whole runs on real workers.
"""

import signal
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("distributed", reason="dask.distributed is not installed (s2o[distributed])")

from calibrate import calibrate, pipeline
from calibrate.commands import calibrate as command
from calibrate.curves.measure import _with_all_shapes
from calibrate.pipeline import OfKind, calibrate_kinds
from calibrate.proof.state import Problem, ProblemKind
from calibrate.recipe import Recipe
from calibrate.work import cluster
from s2o_runtime.config import TileConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.errors import ConfigError, InputError, ResourceError, S2OError
from s2o_runtime.identity import Geometry

A, B, LATE = (DeviceIdentity("cuda", f"NVIDIA {name}", (9, 0), 132, 1) for name in ("A", "B", "Late"))
ROWS = {A: 64, B: 128, LATE: 64}


class Cluster:
    """Whose workers have two kinds of GPU at first, and a third when the first calibration is done."""

    name, geometry, fingerprint, device = "tiny", Geometry("llama", 1, 1, 1, 64), "f", A

    def __init__(self):
        self.present = [A, B]

    def kinds(self):
        return list(self.present)

    def aimed_at(self, device):
        return SimpleNamespace(device=device)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Outcomes of a run whose stages are made up, and the shapes that each kind's curves had."""
    workers, shapes_of = Cluster(), {}
    failures = {}

    @contextmanager
    def executor(recipe, prompts):
        yield workers

    def calibrated(run, tiles, shapes):
        device = run.executor.device
        shapes_of[device.name] = sorted(shape.block_m for shape in shapes[512])
        workers.present = [LATE, A, B]
        if device in failures:
            raise failures[device]
        return f"result of {device.name}"

    def tiles(run):
        if isinstance(failures.get(run.executor.device), InputError):
            raise failures[run.executor.device]
        return {512: (TileConfig(block_m=ROWS[run.executor.device]),)}

    monkeypatch.setattr(cluster, "cluster_executor", executor)
    monkeypatch.setattr(pipeline, "_prompts", lambda *_: None)
    monkeypatch.setattr(pipeline, "_of_run", lambda *_: [])
    monkeypatch.setattr(pipeline, "_calibrated", calibrated)
    monkeypatch.setattr(pipeline, "_worthwhile_tiles", tiles)
    options = {"model": "tiny", "lengths": (512,), "out": tmp_path / "p", "gpus": 2, "target_gpu": ("all",)}

    def outcomes(**errors):
        failures.update({{"A": A, "B": B}[name]: error for name, error in errors.items()})
        return list(calibrate_kinds(Recipe.of(options))), shapes_of

    return outcomes


def test_each_kind_gets_a_profile_also_one_that_joins_late(run, tmp_path):
    """Curves have the shapes of all kinds that are there; they share one journal."""
    outcomes, shapes_of = run()
    assert [outcome.device for outcome in outcomes] == [A, B, LATE]
    assert [outcome.result for outcome in outcomes] == [f"result of NVIDIA {name}" for name in ("A", "B", "Late")]
    assert [outcome.recipe.out for outcome in outcomes] == [tmp_path / f"nvidia-{name}" / "p" for name in
                                                            ("a", "b", "late")]  # fmt: skip
    assert {outcome.recipe.journal_path for outcome in outcomes} == {tmp_path / "tiny.journal.sqlite"}
    assert shapes_of == {"NVIDIA A": [64, 128], "NVIDIA B": [64, 128], "NVIDIA Late": [64]}


def test_a_kind_that_fails_leaves_the_others(run):
    gone, unfit = ResourceError("no worker with A is there"), InputError("no tile runs on this GPU")
    outcomes, shapes_of = run(A=gone, B=unfit)
    assert [(outcome.device, outcome.result) for outcome in outcomes] == [
        (B, unfit), (A, gone), (LATE, "result of NVIDIA Late"),
    ]  # fmt: skip
    assert shapes_of == {"NVIDIA A": [64], "NVIDIA Late": [64]}  # of B nothing is known


def test_a_bug_is_not_taken_for_a_failure_of_one_kind(run):
    with pytest.raises(KeyError):
        run(A=KeyError("a bug"))


def test_one_result_is_not_asked_of_several_kinds(tmp_path):
    made = Recipe.of({"model": "demo", "lengths": (512,), "out": tmp_path / "p", "gpus": 2, "target_gpu": ("A", "B")})
    with pytest.raises(ConfigError, match=r"target_gpu A, B is several kinds of GPU.*call calibrate_kinds\(\)"):
        calibrate(made)


def test_curves_are_found_with_further_shapes():
    def key(*shapes, layer=0):
        return {"layer": layer, "shapes": [list(shape) for shape in shapes], "prompts": ["p"]}

    small, large = (64, 256), (128, 512)
    there = [key(small, large), key(small), key(large, (128, 1024), small), key(large, layer=1)]
    assert _with_all_shapes(key(small), there) == there[1]  # itself, before others
    assert _with_all_shapes(key(large), there) == there[2]
    assert _with_all_shapes(key(large, (64, 1024)), there) is None
    assert _with_all_shapes(key(small, layer=1), there) is None
    assert _with_all_shapes(key(large) | {"gpu": ["A", 1, 1]}, there) is None


@pytest.fixture
def main(tmp_path, monkeypatch, capsys):
    """The command for two kinds of GPU with made-up ends."""
    monkeypatch.chdir(tmp_path)
    terminate = signal.getsignal(signal.SIGTERM)

    def run(*ends, flags=()):
        def finished_kinds(recipe, *, progress, command, estimate):
            for device, end in zip((A, B), ends, strict=True):
                yield OfKind(device, recipe.for_gpu(device.name[-1:].lower()), end)

        monkeypatch.setattr(command, "finished_kinds", finished_kinds)
        monkeypatch.setattr("calibrate.report.output.print_report", lambda report, console: print("the report"))
        given = ["--model", "demo", "--lengths", "512", "--device", "cpu", "--gpus", "2", "--target-gpu", "all"]
        code = command.main([*given, "--out", "p.safetensors", "--quiet", *flags])
        return code, capsys.readouterr()

    yield run
    signal.signal(signal.SIGTERM, terminate)


def end(*problems):
    problems = [Problem(ProblemKind.OVER_LIMIT, 512, text) for text in problems]
    report = SimpleNamespace(calibration_seconds=7.2, to_json=lambda: {"met": not problems})
    return SimpleNamespace(written=not problems, problems=problems, report=report, report_files=(Path("r"),))


def test_the_command_lists_all_kinds_at_the_end(main):
    code, said = main(end(), end())
    assert code == 0
    assert said.out.count("the report") == 2
    assert said.out.splitlines()[-2:] == [
        f"NVIDIA {name} (sm_90, 132 SMs): wrote {name.lower()}/p.safetensors in 7 s" for name in "AB"
    ]


@pytest.mark.parametrize(
    ("ends", "code", "sentences"),
    [
        ((end(), ResourceError("its workers are gone")), 4, ["NVIDIA B (sm_90, 132 SMs): its workers are gone"]),
        (
            (end("layer 3 is over"), end()),
            3,
            ["NVIDIA A (sm_90, 132 SMs): the proof failed, so no profile was written"],
        ),
        (
            (InputError("no tile runs"), end("layer 3 is over")),
            3,
            ["NVIDIA A (sm_90, 132 SMs): no tile runs", "NVIDIA B (sm_90, 132 SMs): the proof failed"],
        ),
    ],
)
def test_its_exit_code_is_the_worst_of_them(ends, code, sentences, main, caplog):
    returned, said = main(*ends)
    assert returned == code
    lines = said.err.splitlines()[-len(sentences) :]
    assert len(lines) == len(sentences)
    for line, sentence in zip(lines, sentences, strict=True):
        assert line.startswith(f"s2o-calibrate: {sentence}")
    assert said.out.count("wrote") == sum(not isinstance(one, S2OError) and one.written for one in ends)
