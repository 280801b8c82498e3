#!/usr/bin/env python3
"""Write docs/results.md and the pictures of docs/results from the raw JSON there.

    python -m scripts.docs.results            reads docs/results/*.json, writes docs/results.md and SVGs beside the JSON
    python -m scripts.docs.results --check    writes nothing, and fails if a file differs from what would be written

No number of the page is typed by hand. NAME.note.txt beside NAME.json is shown under that file's tables.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from s2o_runtime.errors import S2OError
from s2o_runtime.files import write_atomically
from scripts.bench.common import BAD_INPUT, OK, Parser
from scripts.bench.paged import PagedFile
from scripts.bench.schema import (
    CALIBRATED,
    DENSE,
    OF_FORM,
    ONE_TAU,
    PUBLISHED,
    AttentionFile,
    BudgetRow,
    BudgetsFile,
    CalibratedLength,
    CalibrationFile,
    CoverageFile,
    CoverageRow,
    EvaluationFile,
    MethodRow,
    MethodsFile,
    PrefillFile,
    ProfileRow,
    ProfilesFile,
    RehearsalFile,
    ResultFile,
    RetrievalRow,
    setting_name,
)
from scripts.bench.serving import ServingFile
from scripts.bench.tails import TailsFile
from scripts.docs.attention_plot import draw_attention
from scripts.docs.deployment_results import paged, rehearsals, serving, tails
from scripts.docs.markdown import table
from scripts.docs.methods_plots import draw_errors, draw_times
from scripts.docs.plots import Draw, svg
from scripts.docs.results_data import (
    ANY,
    NEAR,
    S2O_CALIBRATED,
    TIE,
    Bench,
    Source,
    Sources,
    Time,
    attending,
    benches,
    fastest,
    missing,
    ms,
    nearest,
    newest,
    of_format,
    on_front,
    read_sources,
    relative_at,
    small,
    three,
)

ROOT = Path(__file__).resolve().parents[2]
POINT = 0.01  # of all answers
UNIFORM = "segment=1024,grain=4,tail"  # the options of ONE_TAU besides its tau, as s2o-eval names them
AS_PUBLISHED = r"segment=1024,stop_rule=(raw|paper),row_reduce=max"  # those of PUBLISHED
BETWEEN = {"methods": " ", "heads": "/"}  # what separates the values of an option; of all others a comma
ERRORS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
SHARES = (0.2, 0.25, 0.33, 0.5, 0.75, 1.0)  # of dense attention's time


def main(argv: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser("scripts.docs.results", description=__doc__, formatter_class=raw)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something differs")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="the folder of results.md and results/")
    args = parser.parse_args(argv)
    try:
        sources = read_sources(args.docs / "results")
        files = {args.docs / "results.md": page(sources).encode()}
        files |= {args.docs / "results" / name: svg(draw) for name, draw in pictures(sources).items()}
        stale = [path for path, data in files.items() if not path.is_file() or path.read_bytes() != data]
        if args.check:
            for path in stale:
                print(f"{path.name} is not what docs/results holds: run python -m scripts.docs.results")
            return 1 if stale else OK
        for path in stale:
            write_atomically(path, files[path])
            print(f"wrote {path}")
    except S2OError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return BAD_INPUT
    return OK


def pictures(sources: Sources) -> dict[str, Draw]:
    """What draws each picture, by file name."""
    compared = newest(benches(sources))
    files: dict[str, Draw] = {}
    if compared:
        files = {"methods-error.svg": partial(draw_errors, compared), "methods-time.svg": partial(draw_times, compared)}
    for source in of_format(sources, AttentionFile):
        files[Path(source.name).with_suffix(".svg").name] = partial(draw_attention, source.file)
    return files


def page(sources: Sources) -> str:
    """docs/results.md."""
    compared = benches(sources)
    parts = [
        [
            "# Results",
            "Made by `python -m scripts.docs.results` from the raw JSON in [results/](results); edit nothing here.",
        ],
        _origins(sources),
        _all_methods(compared),
        _equal_error(compared),
        _breakdown(compared),
        _retrieval(sources, compared),
        _kernel(of_format(sources, AttentionFile)),
        _prefill(of_format(sources, PrefillFile)),
        _calibrations(of_format(sources, CalibrationFile)),
        _profiles(of_format(sources, ProfilesFile)),
        _coverage(of_format(sources, CoverageFile)),
        rehearsals(of_format(sources, RehearsalFile)),
        serving(of_format(sources, ServingFile)),
        tails(of_format(sources, TailsFile)),
        paged(of_format(sources, PagedFile)),
    ]
    return "\n\n".join(block for part in parts for block in part) + "\n"


def _origins(sources: Sources) -> list[str]:
    shown = of_format(sources, ResultFile)
    if not shown:
        return ["Nothing is measured yet."]
    rows = [[source.link, source.file.date, _hardware(source.file), _versions(source.file)] for source in shown]
    out = ["## Where the numbers come from", table(("file", "date", "device", "versions"), rows, "l")]
    out += [
        "These are the commands as they were typed, with the options of their day, on the GPU or CPU that the name of "
        "the file says. Profiles are named without their folders; each `--method` of s2o-calibrate makes one."
    ]
    out += ["\n".join(("```sh", *map(command, shown), "```"))]
    others = ", ".join(source.link for source in sources if source not in shown)
    return [*out, f"Raw data that is not shown here: {others}."] if others else out


def _hardware(file: ResultFile) -> str:
    return file.device if isinstance(file.device, str) else "{name}, {sm_count} SMs".format(**file.device)


def _versions(file: ResultFile) -> str:
    extra = {name: getattr(file, name) for name in ("python", "cuda", "cudnn")}
    versions = file.versions | {name: version for name, version in extra.items() if version is not None}
    names = ("torch", "triton", "transformers", "python", "cuda", "cudnn")
    return ", ".join(f"{name} {versions[name]}" for name in names if name in versions)


def command(source: Source[ResultFile]) -> str:
    """The command that would measure a file again."""
    file, out = source.file, f"--out docs/results/{source.name}"
    if isinstance(file, EvaluationFile):
        return f"{file.command}  # summary.json is {source.name}"
    if isinstance(file, BudgetsFile):
        guards = ("off" if row.worst_rows is None else f"{row.worst_rows:g}" for row in file.rows)
        lists = {"budgets": (f"{row.budget:g}" for row in file.rows), "worst-rows": guards}
        options = [f"--{name} {','.join(dict.fromkeys(values))}" for name, values in lists.items()]
        return " ".join((file.program, f"--model {file.model} --length {file.length}", *options, out))
    if isinstance(file, CalibrationFile):
        return f"{file.command}  # report.json is {source.name}"
    if isinstance(file, ProfilesFile):
        profiles = " ".join(dict.fromkeys(row.profile for row in file.rows))
        lengths = ",".join(dict.fromkeys(str(row.length) for row in file.rows))
        drawn = f"--model {file.model} --lengths {lengths} --num-prompts {file.num_prompts} --seed {file.seed}"
        return f"{file.program} {profiles} {drawn} {out}"
    if isinstance(file, CoverageFile):
        text = "" if file.prompts is None else f" --prompts {shlex.quote(file.prompts)}"
        numbers = f"--seed {file.seed} --num-prompts {file.num_prompts}"
        return f"{file.program} {file.profile} --model {file.model} {numbers}{text} {out}"
    assert isinstance(file, (AttentionFile, MethodsFile, PrefillFile, RehearsalFile, ServingFile, TailsFile, PagedFile))
    options = [text for name, value in file.settings.items() if (text := _option(name, value))]
    if isinstance(file, AttentionFile):
        options += [f"--tile {tile}" for tile in dict.fromkeys(_tile(entry.tile) for entry in file.results)]
    return " ".join((file.program, *options, out))


def _option(name: str, value: Any) -> str:
    flag = "--" + name.replace("_", "-")
    if value is True:
        return flag
    if value is None or value is False or value == []:
        return ""
    values = value if isinstance(value, list) else [value]
    words = [shlex.quote(f"{number:g}" if isinstance(number, float) else str(number)) for number in values]
    if name == "profile":
        return " ".join(f"{flag} {word}" for word in words)
    return f"{flag} {BETWEEN.get(name, ',').join(words)}"


def _tile(tile: dict[str, Any]) -> str:
    text = "{block_m}x{block_n}x{chunk}:{num_warps}:{num_stages}".format(**tile)
    return f"{text}:ws" if tile.get("specialized") else text


def _calibrations(sources: Sequence[Source[CalibrationFile]]) -> list[str]:
    """Whole calibrations: each length as adjusted and as certified, kinds of text, and the longest's layers."""
    out = [
        "## Calibrations",
        "Attention and prefill are how many times faster than dense attention, on the first of the prompts that layers "
        "were adjusted on; density, error and KL are means over these prompts. Certified is what was measured on other "
        "prompts: how far the bounds of the layers' mean errors are at most from their limits, the KL that the next "
        "prompt keeps below with the probability given, and the KL between two dense implementations (noise).",
    ]
    if not sources:
        return [*out, missing(CalibrationFile)]
    lengths = ("tokens", "density", "attention", "prefill", "rel_mse", "KL")
    certified = ("prompts", "bound / limit", "next KL", "noise", "needles kept")
    for source in sources:
        file = source.file
        by_length = {entry["length"]: entry for entry in (file.certificate or {}).get("lengths", ())}
        out += [
            f"### `{file.model}` ({source.link})",
            f"{file.architecture}; {file.calibration_seconds:.0f} s. {source.note}".strip(),
            table(
                (*lengths, *certified), [_calibrated(entry, by_length.get(entry.length)) for entry in file.lengths], "r"
            ),
        ]
        domains = [
            [str(length), part["domain"], str(part["prompts"]), small(part["kl"]), f"{part['error_over_limit']:.0%}"]
            for length, entry in sorted(by_length.items())
            for part in entry.get("domains") or ()
        ]
        if domains:
            out += [table(("tokens", "text", "prompts", "mean KL", "largest layer error / limit"), domains, "rlr")]
        longest = max(file.lengths, key=lambda entry: entry.length)
        bounds = (by_length.get(longest.length) or {}).get("layers") or [{}] * len(longest.layers)
        rows = [
            [
                str(layer.layer),
                f"{layer.density:.3f}",
                small(layer.held_out_rel_mse),
                "-" if bound.get("bound") is None else small(bound["bound"]),
                _times_faster(layer.dense_seconds, layer.seconds),
            ]
            for layer, bound in zip(longest.layers, bounds, strict=True)
        ]
        names = ("layer", "density", "rel_mse", "certified bound", "attention")
        out += [f"Layers at {longest.length} tokens:", table(names, rows, "r")]
    return out


def _calibrated(entry: CalibratedLength, certified: dict[str, Any] | None) -> list[str]:
    """One row: a length on the adjust prompts, and as certified."""
    layers = entry.layers
    shown = [
        str(entry.length),
        f"{sum(layer.density for layer in layers) / len(layers):.3f}",
        _times_faster(entry.dense_attention_seconds, entry.attention_seconds),
        _times_faster(entry.dense_prefill_seconds, entry.prefill_seconds),
        small(sum(layer.held_out_rel_mse for layer in layers) / len(layers)),
        small(entry.kl),
    ]
    if certified is None:
        return [*shown, "-", "-", "-", "-", "-"]
    shares = [
        layer["bound"] / layer["limit"]
        for layer in certified["layers"]
        if layer.get("bound") is not None and layer["density"] < 1.0
    ]
    kept = certified["retrieval"]
    return [
        *shown,
        str(certified["prompts"]),
        f"{max(shares):.0%}" if shares else "-",
        "{} ({:.0%})".format(small(certified["kl"]["value"]), certified["kl"]["probability"]),
        "-" if certified["noise_floor"] is None else small(certified["noise_floor"]),
        f"{kept['kept']} of {kept['found']}" if kept else "-",
    ]


def _times_faster(dense: float | None, seconds: float | None) -> str:
    return f"{dense / seconds:.2f}x" if dense and seconds else "-"


def _profiles(sources: Sequence[Source[ProfilesFile]]) -> list[str]:
    """Profiles of one model beside one another."""
    out = [
        "## Profiles on the same prompts",
        "Attention of all layers on one prompt, medians with a cold L2, in turns with cuDNN; errors, KL and needles "
        "are of fresh prompts of four kinds of text, which are the same for each profile.",
    ]
    if not sources:
        return [*out, missing(ProfilesFile)]
    for source in sources:
        note = [source.note] if source.note else []
        rows = [row.cells() for row in source.file.rows]
        out += [f"### `{source.file.model}` ({source.link})", *note, table(ProfileRow.COLUMNS, rows, "lr")]
    return out


def _coverage(sources: Sequence[Source[CoverageFile]]) -> list[str]:
    """Fresh prompts against certificates."""
    out = [
        "## Certificates on fresh prompts",
        "How many of the layers that are not dense have a mean error over fresh prompts above their certified bound "
        "(over all rows, over the last eighth, of calls with 64 and 512 new tokens), and how many prompts have a KL "
        "above what the next prompt is certified to keep within. A cell is one layer on one prompt; bounds are for "
        "means, so some cells are above. The bounds are for the mixture of all kinds of text: one alone may be above.",
    ]
    if not sources:
        return [*out, missing(CoverageFile)]
    for source in sources:
        file = source.file
        out += [f"### `{file.model}`, {file.budget} ({source.link})", *noted(source)]
        out += [table(CoverageRow.COLUMNS, [row.cells() for row in file.rows], "rlr")]
    return out


def _all_methods(compared: Sequence[Bench]) -> list[str]:
    out = ["## Attention, every method"]
    if not compared:
        return [*out, missing(MethodsFile)]
    out.append(
        "Times are of all layers of a model and all prompts of a batch together, each call with a cold L2, medians of "
        "turns. They are the GPU's: it is kept busy while a call is launched, so that methods of many small operations "
        "are not charged for their launches. Speedups are over dense attention through cuDNN in the same run. mse and "
        "rel_mse are the layers' means against dense attention in float32; worst row: the largest over the layers, "
        "where a layer's is the error that one row in a hundred exceeds; rows and a number: calibrated with that guard "
        "on worst rows, 0 for none, instead of the profile's own. ● is on the Pareto front of time against rel_mse, "
        f"where less than {TIE:.0%} is no difference. The baselines are written from their papers; "
        "[baselines.md](baselines.md) says what is left out, and which of them choose blocks in "
        "plain torch, which their authors may do faster."
    )
    names = ("", "method", "setting", "ms", "selecting", "speedup", "density", "mse", "rel_mse", "worst row")
    for bench in compared:
        settings = bench.source.file.settings
        layers = len(bench.rows[0].layers)
        out.append(f"### {bench.title}")
        out.append(
            f"`{settings['data']}`, {layers} layers, batch {settings['batch']}, "
            f"errors in {settings['error_rows']} rows of each prompt; {bench.source.link}."
        )
        out.append(table(names, [_method_row(row, bench) for row in bench.rows], "lllr"))
        out += [*over_budget(bench), *noted(bench.source)]
    return [*out, "![Time over dense against rel_mse](results/methods-error.svg)"]


def _method_row(row: MethodRow, bench: Bench) -> list[str]:
    mark = "●" if on_front(row, bench.rows) else ""
    times = [ms(row.seconds), ms(row.selecting_seconds), f"{three(bench.dense / row.seconds)}x"]
    errors = [small(row.mse), small(row.rel_mse), small(row.worst)]
    return [mark, row.method, _quoted(row.setting), *times, f"{row.density:.3f}", *errors]


def _quoted(setting: str) -> str:
    return f"`{setting}`" if setting else ""


def over_budget(bench: Bench) -> list[str]:
    """A sentence on the calibrated settings that exceed their budgets on this text, if there are any."""
    ratios = []
    for row in bench.rows:
        budget = re.match(r"(rel_mse|mse) ([\d.e+-]+)", row.setting) if row.method in CALIBRATED.values() else None
        if budget:
            ratios.append((row.mse if budget[1] == "mse" else row.rel_mse) / float(budget[2]))
    over = sum(ratio > 1 for ratio in ratios)
    if not over:
        return []
    return [
        f"**Over budget:** on this text {over} of {len(ratios)} calibrated settings exceed the error that they were "
        f"calibrated for, the worst {three(max(ratios))} times."
    ]


def noted(source: Source[Any]) -> list[str]:
    return [f"**Caution:** {source.note}"] if source.note else []


def _equal_error(compared: Sequence[Bench]) -> list[str]:
    out = ["## Speed at equal error"]
    if not compared:
        return [*out, missing(MethodsFile)]
    out.append(
        "Time over dense attention through cuDNN at a rel_mse, log-log between the two neighbouring settings of a "
        "method that no other setting of it beats. ≤: its fastest setting is more exact than that; -: none is so "
        "exact. Settings that compute everything count as dense attention, which is good for every error. The fastest "
        f"is bold, and so is every method less than {TIE:.0%} behind. The sentences below the tables leave out the "
        "cheapest for each head, because it may be S2O in every head."
    )
    for bench in compared:
        times = {error: relative_at(bench, error) for error in ERRORS}
        rows = [[method, *(_relative(times[error], method) for error in ERRORS)] for method in bench.methods]
        out.append(f"### {bench.title} at equal error")
        out.append(table(("method", *(f"{error:.0e}" for error in ERRORS)), rows, "lr"))
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
        ("S2O as calibrated", lambda method: method == S2O_CALIBRATED),
    ]
    sentences = []
    for name, belongs in groups:
        if any(belongs(method) for method in bench.methods):
            behind = [text for error in ERRORS if (text := _behind(bench, error, belongs))]
            verdict = f"not the fastest at {'; '.join(behind)}"
            if not behind:
                verdict = "the fastest, or ties, at all of these errors"
            sentences.append(f"At {bench.title} {name} is {verdict}.")
    return sentences


def _behind(bench: Bench, error: float, belongs: Callable[[str], bool]) -> str:
    """An error with the group's time and the fastest method's there; empty where the group wins or ties."""
    times = {method: time for method, time in relative_at(bench, error).items() if method != ANY}
    winners = fastest(times)
    if any(belongs(method) for method in winners):
        return ""
    group = [time for method, time in times.items() if belongs(method)]
    best = str(min(group, key=lambda time: time.value)) if group else "no setting is so exact"
    return f"{error:.0e} ({best}; {winners[0]}: {times[winners[0]]})"


def _breakdown(compared: Sequence[Bench]) -> list[str]:
    out = ["## Where the time goes"]
    if not compared:
        return [*out, missing(MethodsFile)]
    out.append(
        f"Of each method the setting whose rel_mse is nearest to {NEAR:.0e}, of those that no other setting of it "
        "beats: selecting (ranking keys or choosing blocks, timed alone) and attending (the rest of the call)."
    )
    names = ("tokens", "method", "setting", "rel_mse", "selecting ms", "attending ms", "selecting")
    rows = []
    for bench in compared:
        for method in bench.methods:
            row = nearest(bench.of(method), NEAR)
            parts = [ms(row.selecting_seconds), ms(attending(row)), f"{row.selecting_seconds / row.seconds:.0%}"]
            rows.append([bench.title.replace(" tokens", ""), method, _quoted(row.setting), small(row.rel_mse), *parts])
    return [*out, table(names, rows, "lllr"), "![Selecting and attending](results/methods-time.svg)"]


def _retrieval(sources: Sources, compared: Sequence[Bench]) -> list[str]:
    out = ["## Retrieval"]
    studies, evaluations = of_format(sources, BudgetsFile), of_format(sources, EvaluationFile)
    for study in studies:
        out += _needles(study)
    for evaluation in evaluations:
        out += _answers(evaluation, compared)
    lacking = [BudgetsFile] * (not studies) + [EvaluationFile] * (not evaluations)
    return out + [missing(cls) for cls in lacking]


def _needles(source: Source[BudgetsFile]) -> list[str]:
    """What every budget and guard costs in needles, density and time."""
    names = ("budget", "worst rows", "needles kept", "density", "rel_mse", "KL", "attention ms", "speedup")
    rows = []
    for row in source.file.rows:
        guard = "off" if row.worst_rows is None else f"{row.worst_rows:g}"
        kept = "{} of {}".format(*row.needles) if row.needles else "-"
        numbers = [f"{row.density:.3f}", small(row.rel_mse), small(row.kl)]
        rows.append([f"{row.budget:.0e}", guard, kept, *numbers, *_attention(row)])
    out = [f"### What a budget buys, `{source.file.model}` at {source.file.length} tokens"]
    out += [
        "S2O as calibrated; worst rows: the guard on single rows; needles kept: of those that dense attention finds; "
        f"{source.link}.",
        table(names, rows, "r"),
    ]
    timed = [
        (row.attention_seconds, row)
        for row in source.file.rows
        if row.needles and row.attention_seconds and row.needles[0] >= (1 - POINT) * row.needles[1]
    ]
    if timed:
        seconds, best = min(timed, key=lambda pair: pair[0])
        guard = "no guard" if best.worst_rows is None else f"guard {best.worst_rows:g}"
        out.append(
            f"Within one point of dense the fastest is budget {best.budget:.0e} with {guard}: "
            f"{ms(seconds)} ms, {_attention(best)[1]}."
        )
    return out + noted(source)


def _attention(row: BudgetRow) -> list[str]:
    seconds, dense = row.attention_seconds, row.dense_attention_seconds
    return ["-" if seconds is None else ms(seconds), f"{three(dense / seconds)}x" if seconds and dense else "-"]


def _answers(source: Source[EvaluationFile], compared: Sequence[Bench]) -> list[str]:
    """How many of several needles each variant finds, with its attention time where the bench has it."""
    model = source.file.model
    same = [bench for bench in compared if bench.data == model]
    rows = [row for row in source.file.retrieval if row.task == "multi"]
    out = [f"### Many needles, `{model}`"]
    if not rows:
        return [*out, f"{source.link} has no task `multi`: run s2o-eval with it."]
    names = ("tokens", "variant", "found", "dense finds", "density", "attention ms", "over dense")
    cells, sentences, tables = [], [], []
    for length in sorted({row.length for row in rows}):
        of_length = [row for row in rows if row.length == length]
        times: dict[str, Time] = {}
        answers: dict[str, list[tuple[float, int]]] = {}  # of a method's settings: time over dense, needles found
        for row in of_length:
            cell = [str(length), f"`{row.variant}`", *_counts(row), f"{row.density:.3f}"]
            measurement = measured(row.variant, length, same)
            if measurement is None:
                cells.append([*cell, "-", "-"])
                continue
            bench, timed = measurement
            share = timed.seconds / bench.dense
            cells.append([*cell, ms(timed.seconds), three(share)])
            answers.setdefault(timed.method, []).append((share, row.found))
            if row.found >= row.dense_found - POINT * row.asked:
                times[row.variant] = Time(share)
        if times:
            first = fastest(times)[0]
            sentences.append(
                f"At {length} tokens, of the variants within one point of dense whose attention was timed, `{first}` "
                f"is the fastest: {times[first]} of dense's time."
            )
        if answers:
            tables += _at_speed(answers, length, of_length[0].asked)
    about = "Answers of s2o-eval's task `multi`; attention times are those of the tables above, of the same model; "
    about += f"{source.link}."
    return [*out, about, table(names, cells, "llr"), *sentences, *tables, *noted(source)]


def _counts(row: RetrievalRow) -> list[str]:
    return [f"{row.found} of {row.asked}", f"{row.dense_found} of {row.asked}"]


def _at_speed(answers: Mapping[str, Sequence[tuple[float, int]]], length: int, asked: int) -> list[str]:
    """The most that a setting of each method finds within a share of dense attention's time."""
    rows = []
    for method, pairs in answers.items():
        best = [max((found for time, found in pairs if time <= share * (1 + TIE)), default=None) for share in SHARES]
        rows.append([method, *("-" if found is None else str(found) for found in best)])
    about = (
        f"The most of {asked} that a measured setting finds in so much of dense attention's time; -: none is so fast."
    )
    names = ("method", *(f"{share:g}" for share in SHARES))
    return [f"### {length} tokens, retrieval at equal speed", about, table(names, rows, "lr")]


def measured(variant: str, length: int, compared: Sequence[Bench]) -> tuple[Bench, MethodRow] | None:
    """The bench's row of what s2o-eval calls a variant, if the variant's name tells which row that is."""
    wanted = named(variant)
    rows = ((bench, row) for bench in compared for row in bench.rows if bench.length == length)
    return next((pair for pair in rows if (pair[1].method, pair[1].setting.removesuffix(", proven")) == wanted), None)


def named(variant: str) -> tuple[str, str]:
    """A variant of s2o-eval as method and setting of the bench.

    A profile's name must be its budget, such as rel-mse-0.001 or rel-mse-0.001-rows-0, behind a folder with the
    name of its `--method`; without a folder it is S2O's.
    """
    if variant == "dense":
        return DENSE, ""
    budget = r"(rel-mse|mse)-([\d.e+-]+?)(?:-rows-([\d.e+-]+))?"
    profile = re.fullmatch(rf"(?:(?:.*/)?({'|'.join(CALIBRATED)})/)?{budget}", variant)
    if profile:
        method, kind, value, guard = profile.groups()
        setting = setting_name(kind.replace("-", "_"), float(value), float(guard) if guard else None)
        return CALIBRATED[method or "s2o"], setting
    if variant.startswith("tau="):
        tau, _, options = variant.partition(",")
        if re.fullmatch(AS_PUBLISHED, options):
            return PUBLISHED, tau
        return (ONE_TAU, tau) if options == UNIFORM else ("", "")
    method, _, setting = variant.partition(":")
    return method, setting or "default"


def _kernel(sources: Sequence[Source[AttentionFile]]) -> list[str]:
    out = ["## The kernel alone"]
    if not sources:
        return [*out, missing(AttentionFile)]
    out.append(
        "Tau is set for each head so that it computes the wanted share of the pairs; as published: one tau for all "
        "heads, the paper's stop rule, one representative, no tail. The rate is density x dense time "
        "/ time: 1 means that a computed pair costs what it costs cuDNN."
    )
    names = ("tokens", "tile", "target", "density", "ms", "speedup", "rate", "rate without ranking", "rel_mse")
    for source in sources:
        rows = []
        for entry in source.file.results:
            dense = entry.dense.seconds.median
            rows.append([str(entry.length), "", entry.dense.backend, "", ms(dense), "1.00x", "", "", ""])
            for row in entry.rows:
                target = f"{row.target}{OF_FORM.get(row.form, '')}"
                cells = [str(entry.length), entry.tile_name, target, f"{row.density:.3f}"]
                times = [ms(row.seconds.median), f"{three(dense / row.seconds.median)}x"]
                rates = [f"{row.rate:.2f}", "-" if row.prefill_rate is None else f"{row.prefill_rate:.2f}"]
                rows.append([*cells, *times, *rates, small(row.rel_mse)])
        about = "{heads[0]}/{heads[1]} heads of {head_dim}, batch {batch}, {dtype}, {data} data, segment {segment}, "
        about = (about + "grain {grain}").format(**source.file.settings)
        out += [f"{about}; {source.link}.", table(names, rows, "lllr"), *noted(source)]
    return out


def _prefill(sources: Sequence[Source[PrefillFile]]) -> list[str]:
    out = ["## Time to first token"]
    if not sources:
        return [*out, missing(PrefillFile)]
    out.append("Whole models with random weights. Attention's share bounds what any sparse attention can gain.")
    names = ("model", "tokens", "attention", "density", "seconds", "speedup", "share of attention")
    for source in sources:
        rows = []
        for entry in source.file.results:
            dense = entry.rows[0].seconds.median
            for row in entry.rows:
                seconds = row.seconds.median
                times = [f"{row.density:.3f}", three(seconds), f"{three(dense / seconds)}x", f"{row.share:.0%}"]
                rows.append([entry.model, str(entry.length), row.name, *times])
        out += [f"{source.link}.", table(names, rows, "lllr"), *noted(source)]
    return out


if __name__ == "__main__":
    sys.exit(main())
