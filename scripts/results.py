#!/usr/bin/env python3
"""Write docs/results.md and its pictures from the raw JSON in docs/results.

    python scripts/results.py            reads docs/results/*.json, writes docs/results.md and two SVGs beside the JSON
    python scripts/results.py --check    writes nothing, and fails if what is there differs

No number of the page is typed by hand. NAME.note.txt beside NAME.json is shown under that file's tables.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from benching import BY_METHOD, setting_of
from results_data import (
    ANY,
    ATTENTION,
    BUDGETS,
    CALIBRATED,
    DENSE,
    EVALUATION,
    MAKES,
    METHODS,
    NEAR,
    OTHER,
    PREFILL,
    TIE,
    Bench,
    Row,
    Source,
    Time,
    attending,
    benches,
    fastest,
    ms,
    nearest,
    on_front,
    read,
    relative_at,
    small,
    three,
)
from results_plots import pictures

from calibrate.cli import BAD_INPUT, OK, Parser
from s2o_runtime.errors import S2OError
from s2o_runtime.profile import write_atomically

ROOT = Path(__file__).resolve().parent.parent
POINT = 0.01  # of all answers
UNIFORM = "segment=1024,grain=4,tail"  # what "S2O, one tau" runs besides its tau, as s2o-eval names it
BETWEEN = {"methods": " ", "heads": "/"}  # how a script separates the values of an option; all others by commas
ERRORS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
SHARES = (0.2, 0.25, 0.33, 0.5, 0.75, 1.0)  # of dense attention's time


def main(argv: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser("results", description=__doc__, formatter_class=raw)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something differs")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="the folder of results.md and results/")
    args = parser.parse_args(argv)
    try:
        sources = read(args.docs / "results")
        files = {args.docs / "results.md": page(sources).encode()}
        files |= {args.docs / "results" / name: data for name, data in pictures(benches(sources)).items()}
        stale = [path for path, data in files.items() if not path.is_file() or path.read_bytes() != data]
        if args.check:
            for path in stale:
                print(f"results: {path.name} is not what docs/results holds: run python scripts/results.py")
            return 1 if stale else OK
        for path in stale:
            write_atomically(path, files[path])
            print(f"wrote {path}")
    except S2OError as error:
        print(f"results: {error}", file=sys.stderr)
        return BAD_INPUT
    return OK


def page(sources: Sequence[Source]) -> str:
    """docs/results.md."""
    compared = benches(sources)
    parts = [
        [
            "# Results",
            "Made by `python scripts/results.py` from the raw JSON in [results/](results); edit nothing here.",
        ],
        _origins(sources),
        _every_method(compared),
        _equal_error(compared),
        _breakdown(compared),
        _retrieval(sources, compared),
        _kernel(sources),
        _prefill(sources),
    ]
    return "\n\n".join(block for part in parts for block in part) + "\n"


def _origins(sources: Sequence[Source]) -> list[str]:
    rows, commands = [], []
    for source in sources:
        if source.kind != OTHER:
            rows.append([source.link, source.record.get("date", "not recorded"), _hardware(source), _versions(source)])
            commands.append(command(source))
    if not rows:
        return ["Nothing is measured yet."]
    out = ["## Where the numbers come from", table(("file", "date", "device", "versions"), rows, left=4)]
    out += ["Profiles are named without their folders; each `--method` of s2o-calibrate makes one."]
    out += ["\n".join(("```sh", *commands, "```"))]
    others = ", ".join(source.link for source in sources if source.kind == OTHER)
    return [*out, f"Raw data that is not shown here: {others}."] if others else out


def _hardware(source: Source) -> str:
    device = source.record["device"]
    return device if isinstance(device, str) else f"{device['name']}, {device['sm_count']} SMs"


def _versions(source: Source) -> str:
    record = source.record
    extra = {name: record[name] for name in ("python", "cuda", "cudnn") if record.get(name) is not None}
    shown = ("torch", "triton", "transformers", "python", "cuda", "cudnn")
    every = {**record["versions"], **extra}
    return ", ".join(f"{name} {every[name]}" for name in shown if name in every)


def command(source: Source) -> str:
    """What would measure a file again."""
    record, out = source.record, f"--out docs/results/{source.name}"
    if source.kind == EVALUATION:
        return f"{record.get('command', 's2o-eval')}  # summary.json is {source.name}"
    if source.kind == BUDGETS:
        guards = ("off" if row["worst_rows"] is None else f"{row['worst_rows']:g}" for row in record["rows"])
        lists = {"budgets": (f"{row['budget']:g}" for row in record["rows"]), "worst-rows": guards}
        options = [f"--{name} {','.join(dict.fromkeys(values))}" for name, values in lists.items()]
        head = f"python scripts/study_budgets.py --model {record['model']} --length {record['length']}"
        return " ".join((head, *options, out))
    options = [text for name, value in record["settings"].items() if (text := _option(name, value))]
    if source.kind == ATTENTION:
        options += [f"--tile {tile}" for tile in dict.fromkeys(_tile(entry["tile"]) for entry in record["results"])]
    script = "bench_prefill" if source.kind == PREFILL else "bench_attention"
    return " ".join((f"python scripts/{script}.py", *options, out))


def _option(name: str, value: Any) -> str:
    flag = "--" + name.replace("_", "-")
    if value is True:
        return flag
    if value is None or value is False or value == []:
        return ""
    words = [shlex.quote(f"{each:g}" if isinstance(each, float) else str(each)) for each in _listed(value)]
    if name == "profile":
        return " ".join(f"{flag} {word}" for word in words)
    return f"{flag} {BETWEEN.get(name, ',').join(words)}"


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _tile(tile: dict[str, Any]) -> str:
    text = "{block_m}x{block_n}x{chunk}:{num_warps}:{num_stages}".format(**tile)
    return f"{text}:ws" if tile.get("specialized") else text


def _every_method(compared: Sequence[Bench]) -> list[str]:
    out = ["## Attention, every method"]
    if not compared:
        return [*out, missing(METHODS)]
    out.append(
        "Times are of all layers of a model and all prompts of a batch together, each call with a cold L2, medians of "
        "turns. They are the GPU's: it is kept busy while a call is launched, so that methods of many small operations "
        "are not charged for their launches. Speedups are over dense attention through cuDNN in the same run. mse and "
        "rel_mse are the layers' means against dense attention in float32; worst row: of all layers the worst, of each "
        "layer the row that one in a hundred is worse than; rows 0, rows 0.8: calibrated with another guard on worst "
        "rows than 0.5, 0 for none. ● is on the Pareto front of time against rel_mse, where less than "
        f"{TIE:.0%} is no difference. The rivals are written from their papers, without what "
        "[baselines.md](baselines.md) names, which also says whose choosing its authors may have faster."
    )
    names = ("", "method", "setting", "ms", "selecting", "speedup", "density", "mse", "rel_mse", "worst row")
    for bench in compared:
        settings = bench.source.record["settings"]
        rows = [_method_row(row, bench) for row in bench.rows]
        layers = len(bench.rows[0]["layers"])
        out.append(f"### {bench.length} tokens")
        out.append(
            f"`{settings['data']}`, {layers} layers, batch {settings['batch']}, "
            f"errors in {settings['error_rows']} rows of each prompt; {bench.source.link}."
        )
        out.append(table(names, rows, left=3))
        out += [*over_budget(bench), *noted(bench.source)]
    return [*out, "![Time over dense against rel_mse](results/methods-error.svg)"]


def _method_row(row: Row, bench: Bench) -> list[str]:
    mark = "●" if on_front(row, bench.rows) else ""
    setting = f"`{row['setting']}`" if row["setting"] else ""
    times = [ms(row["seconds"]), ms(row["selecting_seconds"]), f"{three(bench.dense / row['seconds'])}x"]
    errors = [small(row[name]) for name in ("mse", "rel_mse", "worst")]
    return [mark, row["method"], setting, *times, f"{row['density']:.3f}", *errors]


def over_budget(bench: Bench) -> list[str]:
    """What calibrated settings do to their budgets on this text."""
    ratios = []
    for row in bench.rows:
        found = re.match(r"(rel_mse|mse) ([\d.e+-]+)", row["setting"]) if row["method"].endswith("calibrated") else None
        if found:
            ratios.append(row[found[1]] / float(found[2]))
    over = sum(ratio > 1 for ratio in ratios)
    if not over:
        return []
    return [
        f"**Over budget:** on this text {over} of {len(ratios)} calibrated settings exceed the error that they were "
        f"calibrated for, the worst {three(max(ratios))} times."
    ]


def noted(source: Source) -> list[str]:
    return [f"**Caution:** {source.note}"] if source.note else []


def _equal_error(compared: Sequence[Bench]) -> list[str]:
    out = ["## Speed at equal error"]
    if not compared:
        return [*out, missing(METHODS)]
    out.append(
        "Time over dense attention through cuDNN at a rel_mse, log-log between the two neighbouring settings of a "
        "method that none of its own others beats. ≤: its fastest setting is more exact than that; -: none is so "
        "exact. Settings that compute everything count as dense attention, which is good for every error. The fastest "
        f"is bold, and what is less than {TIE:.0%} behind. The cheapest for each head may be S2O in every head, so the "
        "sentences below the tables leave it out."
    )
    for bench in compared:
        times = {error: relative_at(bench, error) for error in ERRORS}
        rows = [[method, *(_relative(times[error], method) for error in ERRORS)] for method in bench.methods]
        out.append(f"### {bench.length} tokens at equal error")
        out.append(table(("method", *(f"{error:.0e}" for error in ERRORS)), rows, left=1))
        out.append(" ".join(verdicts(bench)))
        out += noted(bench.source)
    return out


def _relative(times: Mapping[str, Time], method: str) -> str:
    if method not in times:
        return "-"
    return f"**{times[method]}**" if method in fastest(times) else str(times[method])


def verdicts(bench: Bench) -> list[str]:
    """Sentences that say at which errors S2O, and S2O as calibrated, is not the fastest; `ANY` does not take part."""
    groups: list[tuple[str, Callable[[str], bool]]] = [
        ("S2O", lambda method: method.startswith("S2O")),
        ("S2O as calibrated", lambda method: method == CALIBRATED),
    ]
    said = []
    for name, belongs in groups:
        if any(belongs(method) for method in bench.methods):
            behind = [text for error in ERRORS if (text := _behind(_rivals(bench, error), error, belongs))]
            where = (
                f"not the fastest at {'; '.join(behind)}" if behind else "the fastest, or ties, at all of these errors"
            )
            said.append(f"At {bench.length} tokens {name} is {where}.")
    return said


def _rivals(bench: Bench, error: float) -> dict[str, Time]:
    return {method: time for method, time in relative_at(bench, error).items() if method != ANY}


def _behind(times: Mapping[str, Time], error: float, belongs: Callable[[str], bool]) -> str:
    """Empty where S2O wins or ties."""
    winners = fastest(times)
    if any(belongs(method) for method in winners):
        return ""
    mine = [time for method, time in times.items() if belongs(method)]
    its = str(min(mine, key=lambda time: time.value)) if mine else "no setting is so exact"
    return f"{error:.0e} ({its}; {winners[0]}: {times[winners[0]]})"


def _breakdown(compared: Sequence[Bench]) -> list[str]:
    out = ["## Where the time goes"]
    if not compared:
        return [*out, missing(METHODS)]
    out.append(
        f"Of each method the setting whose rel_mse is nearest to {NEAR:.0e}, of those that none of its own others "
        "beats: selecting (ranking keys or choosing blocks, timed alone) and attending (the rest of the call)."
    )
    names = ("tokens", "method", "setting", "rel_mse", "selecting ms", "attending ms", "selecting")
    rows = []
    for bench in compared:
        for method in bench.methods:
            row = nearest(bench.of(method), NEAR)
            parts = [ms(row["selecting_seconds"]), ms(attending(row))]
            share = f"{row['selecting_seconds'] / row['seconds']:.0%}"
            setting = f"`{row['setting']}`" if row["setting"] else ""
            rows.append([str(bench.length), method, setting, small(row["rel_mse"]), *parts, share])
    return [*out, table(names, rows, left=3), "![Selecting and attending](results/methods-time.svg)"]


def _retrieval(sources: Sequence[Source], compared: Sequence[Bench]) -> list[str]:
    out = ["## Retrieval"]
    studies, evaluations = ([each for each in sources if each.kind == kind] for kind in (BUDGETS, EVALUATION))
    for source in studies:
        out += _needles(source)
    for source in evaluations:
        out += _answers(source, compared)
    return out + [missing(kind) for kind, some in ((BUDGETS, studies), (EVALUATION, evaluations)) if not some]


def _needles(source: Source) -> list[str]:
    names = ("budget", "worst rows", "needles kept", "density", "rel_mse", "KL", "attention ms", "speedup")
    rows = []
    for row in source.record["rows"]:
        guard = "off" if row["worst_rows"] is None else f"{row['worst_rows']:g}"
        found = "{} of {}".format(*row["needles"]) if row["needles"] else "-"
        numbers = [f"{row['density']:.3f}", small(row["rel_mse"]), small(row["kl"])]
        rows.append([f"{row['budget']:.0e}", guard, found, *numbers, *_attention(row)])
    model, length = source.record["model"], source.record["length"]
    out = [f"### What a budget buys, `{model}` at {length} tokens"]
    out += [
        "S2O as calibrated; worst rows: the guard on single rows; needles kept: of those that dense attention finds; "
        f"{source.link}.",
        table(names, rows, left=0),
    ]
    kept = [row for row in source.record["rows"] if row["needles"] and row["attention_seconds"]]
    kept = [row for row in kept if row["needles"][0] >= (1 - POINT) * row["needles"][1]]
    if kept:
        best = min(kept, key=lambda row: row["attention_seconds"])
        guard = "no guard" if best["worst_rows"] is None else f"guard {best['worst_rows']:g}"
        out.append(
            f"Within one point of dense the fastest is budget {best['budget']:.0e} with {guard}: "
            f"{ms(best['attention_seconds'])} ms, {_attention(best)[1]}."
        )
    return out + noted(source)


def _attention(row: Row) -> list[str]:
    seconds, dense = row["attention_seconds"], row.get("dense_attention_seconds")
    return ["-" if seconds is None else ms(seconds), f"{three(dense / seconds)}x" if seconds and dense else "-"]


def _answers(source: Source, compared: Sequence[Bench]) -> list[str]:
    """How many of several needles each variant finds, with its attention time where the bench has it."""
    model = source.record["model"]
    same = [bench for bench in compared if bench.source.record["settings"]["data"] == model]
    rows = [row for row in source.record["retrieval"] if row["task"] == "multi"]
    out = [f"### Many needles, `{model}`"]
    if not rows:
        return [*out, f"{source.link} has no task `multi`: run s2o-eval with it."]
    names = ("tokens", "variant", "found", "dense finds", "density", "attention ms", "over dense")
    cells, sentences, tables = [], [], []
    for length in sorted({row["length"] for row in rows}):
        times: dict[str, Time] = {}
        found_in: dict[str, list[tuple[float, int]]] = {}  # of a method's settings: time over dense, answers
        for row in (each for each in rows if each["length"] == length):
            found = [f"{row[name]} of {row['asked']}" for name in ("found", "dense_found")]
            cell = [str(length), f"`{row['variant']}`", *found, f"{row['density']:.3f}"]
            where = measured(row["variant"], length, same)
            if where is None:
                cells.append([*cell, "-", "-"])
                continue
            bench, timed = where
            share = timed["seconds"] / bench.dense
            cells.append([*cell, ms(timed["seconds"]), three(share)])
            found_in.setdefault(timed["method"], []).append((share, row["found"]))
            if row["found"] >= row["dense_found"] - POINT * row["asked"]:
                times[row["variant"]] = Time(share)
        if times:
            first = fastest(times)[0]
            sentences.append(
                f"At {length} tokens, of the variants within one point of dense whose attention was timed, `{first}` "
                f"is the fastest: {times[first]} of dense's time."
            )
        if found_in:
            asked = next(row["asked"] for row in rows if row["length"] == length)
            tables += _at_speed(found_in, length, asked)
    about = "Answers of s2o-eval's task `multi`; attention times are those of the tables above, of the same model; "
    about += f"{source.link}."
    return [*out, about, table(names, cells, left=2), *sentences, *tables, *noted(source)]


def _at_speed(found_in: Mapping[str, Sequence[tuple[float, int]]], length: int, asked: int) -> list[str]:
    """The most that a setting of each method finds within a share of dense attention's time."""
    rows = []
    for method, some in found_in.items():
        best = [max((found for time, found in some if time <= share * (1 + TIE)), default=None) for share in SHARES]
        rows.append([method, *("-" if each is None else str(each) for each in best)])
    about = (
        f"The most of {asked} that a measured setting finds in so much of dense attention's time; -: none is so fast."
    )
    names = ("method", *(f"{share:g}" for share in SHARES))
    return [f"### {length} tokens, retrieval at equal speed", about, table(names, rows, left=1)]


def measured(variant: str, length: int, compared: Sequence[Bench]) -> tuple[Bench, Row] | None:
    """The bench's row of what s2o-eval calls a variant, if its name tells which that is.

    A profile's must be its budget, such as rel-mse-0.001 or rel-mse-0.001-rows-0, behind the folder s2o, pbs, sparge
    or auto; without a folder it is S2O's.
    """
    wanted = named(variant)
    found = [
        (bench, row)
        for bench in compared
        for row in bench.rows
        if bench.length == length and (row["method"], row["setting"].removesuffix(", proven")) == wanted
    ]
    return found[0] if found else None


def named(variant: str) -> tuple[str, str]:
    """A variant as method and setting of the bench."""
    if variant == "dense":
        return DENSE, ""
    budget = r"(rel-mse|mse)-([\d.e+-]+?)(?:-rows-([\d.e+-]+))?"
    profile = re.fullmatch(rf"(?:(?:.*/)?({'|'.join(BY_METHOD)})/)?{budget}", variant)
    if profile:
        method, kind, value, guard = profile.groups()
        setting = setting_of(kind.replace("-", "_"), float(value), float(guard) if guard else None)
        return BY_METHOD[method or "s2o"], setting
    if variant.startswith("tau="):
        tau, _, rest = variant.partition(",")
        return ("S2O, one tau", tau) if rest == UNIFORM else ("", "")
    method, _, setting = variant.partition(":")
    return method, setting or "default"


def _kernel(sources: Sequence[Source]) -> list[str]:
    out = ["## The kernel alone"]
    some = [source for source in sources if source.kind == ATTENTION]
    if not some:
        return [*out, missing(ATTENTION)]
    out.append(
        "Tau is set for each head so that it computes the wanted share of the pairs. The rate is density x dense time "
        "/ time: 1 means that a computed pair costs what it costs cuDNN."
    )
    names = ("tokens", "tile", "target", "density", "ms", "speedup", "rate", "rate without ranking", "rel_mse")
    for source in some:
        rows = []
        for entry in source.record["results"]:
            dense = entry["dense"]["seconds"]["median"]
            rows.append([str(entry["length"]), "", entry["dense"]["backend"], "", ms(dense), "1.00x", "", "", ""])
            for row in entry["rows"]:
                seconds, alone = row["seconds"]["median"], row["prefill_rate"]
                rates = [f"{row['rate']:.2f}", "-" if alone is None else f"{alone:.2f}"]
                times = [ms(seconds), f"{three(dense / seconds)}x"]
                cells = [str(entry["length"]), entry["tile_name"], str(row["target"]), f"{row['density']:.3f}"]
                rows.append([*cells, *times, *rates, small(row["rel_mse"])])
        about = "{heads[0]}/{heads[1]} heads of {head_dim}, batch {batch}, {dtype}, {data} data, segment {segment}, "
        about = (about + "grain {grain}").format(**source.record["settings"])
        out += [f"{about}; {source.link}.", table(names, rows, left=3)]
        out += noted(source)
    return out


def _prefill(sources: Sequence[Source]) -> list[str]:
    out = ["## Time to first token"]
    some = [source for source in sources if source.kind == PREFILL]
    if not some:
        return [*out, missing(PREFILL)]
    out.append("Whole models with random weights. Attention's share bounds what any sparse attention can gain.")
    names = ("model", "tokens", "attention", "density", "seconds", "speedup", "share of attention")
    for source in some:
        rows = []
        for entry in source.record["results"]:
            dense = entry["rows"][0]["seconds"]["median"]
            for row in entry["rows"]:
                seconds = row["seconds"]["median"]
                times = [f"{row['density']:.3f}", three(seconds), f"{three(dense / seconds)}x", f"{row['share']:.0%}"]
                rows.append([entry["model"], str(entry["length"]), row["name"], *times])
        out += [f"{source.link}.", table(names, rows, left=3)]
        out += noted(source)
    return out


def missing(kind: str) -> str:
    out = f"Not measured yet: `{MAKES[kind]}` would."
    return out + (" Its summary.json belongs into docs/results, under a name of its own." * (kind == EVALUATION))


def table(names: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A Markdown table whose first `left` columns are words."""
    marks = ["---"] * left + ["---:"] * (len(names) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in (names, marks, *rows))


if __name__ == "__main__":
    sys.exit(main())
