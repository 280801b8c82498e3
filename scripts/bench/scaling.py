"""How a calibration scales: the same recipe on one GPU and on several of one host, compared in time and in result.

Steps, each a process of its own, whose outcome is kept in --work so that a later call goes on:

  warm     the recipe with few prompts on one GPU: compiles the kernels, which is once per machine, not per run
  one      the recipe as a plain run, without Dask
  many     the same with --gpus N
  replay   the same again with the times of `one` in its journal: what is chosen must be what `one` chose
  compare  speed-up, what was the same, and OUT/scaling.json

`many` measures its own times, and where two tiles are nearly equally fast it may choose the other one. `replay` has the
times of `one`, so that its profile must be equal to the last bit.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from calibrate.api import planned
from calibrate.options import read_all
from calibrate.pipeline import calibrate
from calibrate.recipe import OPTIONS
from calibrate.versions import now, versions
from s2o_runtime.devices import identify
from s2o_runtime.errors import ConfigError
from s2o_runtime.files import write_atomically
from scripts.bench.common import OK, add_device, bench_parser, check_device, run_command

STEPS = ("warm", "one", "many", "replay", "compare")
TIMES = ("tile", "ranking cost", "timing", "crossover", "prefill")  # kinds of journal entries
DIFFERENT = 1  # exit code: the profiles differ in more than times
FEW = {"num_prompts": 1, "num_held_out": 1, "num_certify": 0}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    if argv is None and len(sys.argv) == 4 and sys.argv[1] == "--run":
        return _run_here(json.loads(sys.argv[2]), Path(sys.argv[3]))
    parser, add = bench_parser("scripts.bench.scaling", __doc__)
    add("--model", "qwen2.5-7b", "with random weights")
    add("--own-weights", False, "the model's own weights", action="store_true")
    add("--lengths", "32768", metavar="N,N")
    add("--num-prompts", 8, "prompts of each length", type=int, metavar="N")
    add("--num-held-out", 4, type=int, metavar="N")
    add("--num-certify", 20, type=int, metavar="N")
    add("--gpus", 2, "workers of the steps many and replay", type=int, metavar="N")
    add("--steps", ",".join(STEPS), metavar="NAME,NAME")
    add("--options", "{}", "further options of the recipe, as JSON", metavar="JSON")
    add("--work", Path("build/scaling"), "where profiles, journals and outcomes are kept", type=Path, metavar="FOLDER")
    add("--out", Path("build/scaling"), "where scaling.json is written", type=Path, metavar="FOLDER")
    add_device(add)
    args = parser.parse_args(argv)

    same = True

    def work() -> None:
        nonlocal same
        check_device(args)
        steps = args.steps.split(",")
        if unknown := set(steps) - set(STEPS):
            raise ConfigError(f"step {min(unknown)!r} is not known: use {', '.join(STEPS)}")
        recipe = {
            "model": args.model,
            "random_weights": not args.own_weights,
            "lengths": args.lengths,
            "num_prompts": args.num_prompts,
            "num_held_out": args.num_held_out,
            "num_certify": args.num_certify,
            "device": args.device,
            **json.loads(args.options),
        }
        args.work.mkdir(parents=True, exist_ok=True)
        for step in steps:
            if step == "compare":
                same = _compare(args.work, args.out, args.gpus, recipe)
            else:
                _step(step, recipe, args.work, args.gpus)

    code = run_command("scripts.bench.scaling", args.out / "scaling.json", work, "shorter --lengths")
    return code or (OK if same else DIFFERENT)


def _step(step: str, recipe: Mapping[str, Any], work: Path, gpus: int) -> None:
    """Run a step in a process of its own, from an empty folder."""
    folder = work / step
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    options = {**recipe, "out": str(folder / "p.safetensors"), "journal": str(folder / "j.sqlite")}
    if step == "warm":
        options |= FEW
    if step in ("many", "replay"):
        options["gpus"] = gpus
    if step == "replay":
        _with_times_of(work / "one" / "j.sqlite", work / "many" / "j.sqlite", folder / "j.sqlite")
    begin = time.monotonic()
    command = [sys.executable, "-m", "scripts.bench.scaling", "--run", json.dumps(options), str(folder / "run.json")]
    subprocess.run(command, check=True)
    outcome = json.loads((folder / "run.json").read_text())
    outcome["process_seconds"] = round(time.monotonic() - begin, 3)
    (folder / "run.json").write_text(json.dumps(outcome))
    print(f"{step}: {outcome['seconds']:.1f} s, with its start {outcome['process_seconds']:.1f} s", flush=True)
    print(f"  phases {outcome['phases']}", flush=True)
    for stage, done in outcome["work"].items():
        print(f"  {stage}: {done['items']} items, {done['seconds']:.1f} s of all workers", flush=True)


def _run_here(options: Mapping[str, Any], result_path: Path) -> int:
    """One run, in this process."""
    recipe = planned(read_all(OPTIONS, options, "scaling")).recipe
    begin = time.monotonic()
    result = calibrate(recipe, progress=False)
    outcome = {
        "wall_seconds": round(time.monotonic() - begin, 3),
        "seconds": round(sum(result.seconds.values()), 3),
        "phases": {name: round(seconds, 3) for name, seconds in result.seconds.items()},
        "work": {stage: asdict(done) for stage, done in result.work.items()},
        "met": result.met,
        "problems": list(map(str, result.problems)),
        "written": result.written,
        "journal_reused": result.journal_reused,
    }
    write_atomically(result_path, json.dumps(outcome).encode())
    return OK


def _with_times_of(one: Path, many: Path, out: Path) -> None:
    """The journal `many` with the times that `one` has in place of its own."""
    shutil.copyfile(many, out)
    with closing(sqlite3.connect(out)) as database, database:
        marks = ",".join("?" * len(TIMES))
        database.execute(f"DELETE FROM entries WHERE kind IN ({marks})", TIMES)
        with closing(sqlite3.connect(one)) as other:
            rows = other.execute(f"SELECT * FROM entries WHERE kind IN ({marks})", TIMES).fetchall()
        database.executemany("INSERT INTO entries VALUES (?, ?, ?, ?)", rows)


def _compare(work: Path, out: Path, gpus: int, recipe: Mapping[str, Any]) -> bool:
    """Write what came out; returns whether the results are the same."""
    runs = {
        step: json.loads((work / step / "run.json").read_text())
        for step in STEPS
        if (work / step / "run.json").is_file()
    }
    one, many = runs["one"], runs["many"]
    curves = _same_entries(work / "one" / "j.sqlite", work / "many" / "j.sqlite", "curves")
    differences = {
        step: profile_differences(work / "one" / "p.safetensors", work / step / "p.safetensors")
        for step in ("many", "replay")
        if step in runs
    }
    result = {
        "when": now(),
        "device": str(identify(torch.device(str(recipe["device"])))),
        "versions": versions(),
        "recipe": dict(recipe),
        "gpus": gpus,
        "speedup": round(one["seconds"] / many["seconds"], 3),
        "speedup_with_start": round(one["process_seconds"] / many["process_seconds"], 3),
        "phase_speedups": {
            name: round(seconds / many["phases"][name], 3)
            for name, seconds in one["phases"].items()
            if many["phases"].get(name)
        },
        "curves_the_same": curves,
        "differences_from_one": differences,
        "equal_apart_from_times": not differences.get("replay", ["the step replay was not run"]),
        "runs": runs,
    }
    (out / "scaling.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{gpus} GPUs: {result['speedup']} times as fast, with their start {result['speedup_with_start']} times")
    print(f"phases: {result['phase_speedups']}")
    print(f"curves the same: {curves[0]} of {curves[1]}")
    for step, of_step in differences.items():
        print(f"{step} against one: {'equal apart from times' if not of_step else '; '.join(of_step[:5])}")
    return bool(result["equal_apart_from_times"]) and curves[0] == curves[1]


def _same_entries(one: Path, other: Path, kind: str) -> tuple[int, int]:
    """How many entries of a kind are the same in two journals, to the last bit, and how many there are."""
    entries = []
    for path in (one, other):
        with closing(sqlite3.connect(path)) as database:
            rows = database.execute("SELECT key, value, tensors FROM entries WHERE kind = ?", (kind,))
            entries.append({key: (value, tensors) for key, value, tensors in rows})
    return sum(entries[0].get(key) == entries[1].get(key) for key in entries[0]), len(entries[0] | entries[1])


def profile_differences(one: Path, other: Path) -> list[str]:
    """Where two profiles differ in anything but times, one text each."""
    documents, tensors = [], []
    for path in (one, other):
        if not path.is_file():
            return [f"{path} was not written"]
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            documents.append({name: json.loads(text) for name, text in metadata.items()})
            tensors.append({name: file.get_tensor(name) for name in list(file.keys())})
    differences = [
        f"tensor {name}"
        for name in sorted(tensors[0] | tensors[1])
        if not torch.equal(tensors[0].get(name, torch.empty(0)), tensors[1].get(name, torch.empty(0)))
    ]
    return differences + list(_json_differences(documents[0], documents[1], ""))


def _json_differences(one: Any, other: Any, name: str) -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            text
            for key in sorted(one.keys() | other.keys())
            if not key.endswith("seconds")
            for text in _json_differences(one.get(key), other.get(key), f"{name}.{key}".strip("."))
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            text
            for number, pair in enumerate(zip(one, other, strict=True))
            for text in _json_differences(*pair, f"{name}[{number}]")
        ]
    return [] if one == other else [f"{name}: {one!r} and {other!r}"]


if __name__ == "__main__":
    sys.exit(main())
