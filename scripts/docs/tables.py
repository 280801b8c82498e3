#!/usr/bin/env python3
"""Write the tables of README and of docs/ that say what was measured, from the raw JSON in docs/results.

    python -m scripts.docs.tables            writes every table between its marker lines
    python -m scripts.docs.tables --check    writes nothing, and fails if a table is not what it would write

A block is named by its marker lines, `<!-- table NAME: make tables writes what is between these lines -->` and
`<!-- /table NAME -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from s2o_runtime.errors import S2OError
from s2o_runtime.files import write_atomically
from scripts.bench.common import BAD_INPUT, OK, Parser
from scripts.bench.schema import (
    DENSE,
    ONE_TAU,
    AttentionEntry,
    AttentionFile,
    BudgetsFile,
    CalibratedLength,
    CalibrationFile,
    EvaluationFile,
    PrefillFile,
)
from scripts.docs.markdown import table
from scripts.docs.results import POINT, measured
from scripts.docs.results_data import (
    S2O_CALIBRATED,
    Bench,
    Sources,
    attending,
    benches,
    ms,
    newest,
    of_format,
    read_sources,
    relative_at,
    small,
    three,
)

ROOT = Path(__file__).resolve().parents[2]
COMPARED_AT = 1e-3  # the rel_mse at which README compares methods; the calibrator's default budget
DEFAULT_GUARD = 0.7  # --worst-rows, a norm
NAMES = {
    DENSE: "dense, cuDNN",
    "dense (FlashAttention-2)": "dense, FlashAttention-2",
    S2O_CALIBRATED: "**S2O, calibrated**",
    ONE_TAU: "S2O, one threshold for all heads",
    "mean-pooling": "mean pooling of blocks",
    "flash-prefill": "FlashPrefill",
    "prism": "Prism",
    "pbs": "PBS-Attn",
    "sparge": "SpargeAttn",
    "a-shape": "A-shape",
    "vertical-slash": "vertical-slash (MInference)",
    "xattention": "XAttention",
    "skip-softmax": "skip-softmax (BLASST)",
}

Tables = Mapping[str, Callable[[Sources], str]]


def comparison(sources: Sources) -> str:
    """README: every method's time over dense attention at one error, and the time in which it keeps the needles."""
    compared = newest(benches(sources))
    times = [relative_at(bench, COMPARED_AT) for bench in compared]
    methods = compared[-1].methods
    retrieving = fastest_retrieval(sources, compared)
    rows = []
    for method in methods:
        cells = [_bold(str(of_length[method]), method) if method in of_length else "-" for of_length in times]
        share = retrieving.get(method)
        rows.append([NAMES.get(method, method), *cells, "-" if share is None else _bold(three(share), method)])
    lengths = [f"{bench.length} tokens" for bench in compared]
    return table(("method", *lengths, "needles at 32768"), rows, "lr")


def _bold(text: str, method: str) -> str:
    return f"**{text}**" if method == S2O_CALIBRATED else text


def fastest_retrieval(sources: Sources, compared: Sequence[Bench]) -> dict[str, float]:
    """The least share of dense attention's time in which a method finds all needles but one in a hundred."""
    shares: dict[str, float] = {}
    for evaluation in of_format(sources, EvaluationFile):
        same = [bench for bench in compared if bench.data == evaluation.file.model]
        for row in evaluation.file.retrieval:
            timed = measured(row.variant, row.length, same) if row.task == "multi" else None
            if timed is None or row.found < row.dense_found - POINT * row.asked:
                continue
            bench, method_row = timed
            share = method_row.seconds / bench.dense
            shares[method_row.method] = min(share, shares.get(method_row.method, share))
    return shares


def crossovers(sources: Sources) -> str:
    """README: by length, what the kernel gains when half is computed, and what whole prefills gained."""
    kernels = {entry.length: entry for entry in of_format(sources, AttentionFile)[-1].file.results}
    lengths = sorted(kernels)
    targets: tuple[tuple[str, float | str], ...] = (("every pair", "never stop"), ("half of the pairs", 0.5))
    rows = [
        [f"the kernel, {pairs} computed", *(_speedup(kernels[length], target) for length in lengths)]
        for pairs, target in targets
    ]
    for source in of_format(sources, CalibrationFile):
        of_length = {entry.length: entry for entry in source.file.lengths}
        cells = [_prefill(of_length[length]) if length in of_length else "-" for length in lengths]
        rows.append([f"prefill of {named(source.file.model)} as calibrated (dense layers)", *cells])
    shares: dict[str, dict[int, float]] = {}
    for prefills in of_format(sources, PrefillFile):
        for entry in prefills.file.results:
            shares.setdefault(entry.model, {})[entry.length] = entry.rows[0].share
    for model, of_model in shares.items():
        cells = [f"{of_model[length]:.0%}" if length in of_model else "-" for length in lengths]
        rows.append([f"share of attention in the dense prefill of {model}", *cells])
    return table(("", *(f"{length} tokens" for length in lengths)), rows, "lr")


def _speedup(entry: AttentionEntry, target: float | str) -> str:
    row = next(row for row in entry.rows if row.target == target)
    return f"{entry.dense.seconds.median / row.seconds.median:.2f}x"


def _prefill(entry: CalibratedLength) -> str:
    dense = sum(layer.density == 1.0 for layer in entry.layers)
    return f"{entry.dense_prefill_seconds / entry.prefill_seconds:.2f}x ({dense} of {len(entry.layers)})"


def named(model: str) -> str:
    """What a reader calls a model that a calibration names by its folder."""
    return {"build/smollm2": "SmolLM2-135M"}.get(model, f"the {model} model" if model == "demo" else model)


def quality(sources: Sources) -> str:
    """docs/budgets.md: what budgets do to needles, KL, top-1 and speed, at one guard."""
    names = ("budget, rel_mse", "guard", "needles kept", "KL", "top-1 the same", "density", "attention")
    rows = []
    for source in of_format(sources, BudgetsFile):
        squared = "squares" in source.note  # older files have squares of what is a norm today
        used = {row.worst_rows for row in source.file.rows if row.worst_rows}
        guards = {guard: guard ** (0.5 if squared else 1) for guard in used}
        shown = min(guards, key=lambda guard: abs(guards[guard] - DEFAULT_GUARD))
        for row in source.file.rows:
            if row.worst_rows not in (shown, None):
                continue
            guard = "off" if row.worst_rows is None else f"{guards[row.worst_rows]:.2f}"
            kept = "{} of {}".format(*row.needles) if row.needles else "-"
            dense, seconds = row.dense_attention_seconds, row.attention_seconds
            speed = f"{dense / seconds:.2f}x" if dense and seconds else "-"
            quality_cells = [kept, small(row.kl), f"{row.top1:.1%}", f"{row.density:.3f}", speed]
            rows.append([f"{row.budget:.0e}", guard, *quality_cells])
    return table(names, rows, "r")


def speed(sources: Sources) -> str:
    """docs/budgets.md: what budgets do to error and speed, at every length that was benched."""
    names = ("tokens", "budget, rel_mse", "density", "rel_mse", "ranking ms", "attending ms", "attention")
    rows = []
    for bench in newest(benches(sources)):
        rows_of_s2o = bench.of(S2O_CALIBRATED)
        budgets = [(re.fullmatch(r"rel_mse ([\d.e-]+)(, proven)?", row.setting), row) for row in rows_of_s2o]
        ordered = sorted(((float(match[1]), row) for match, row in budgets if match), key=lambda pair: pair[0])
        for budget, row in ordered:
            errors = [f"{row.density:.3f}", small(row.rel_mse)]
            times = [ms(row.selecting_seconds), ms(attending(row)), f"{bench.dense / row.seconds:.2f}x"]
            rows.append([str(bench.length), f"{budget:.0e}", *errors, *times])
    return table(names, rows, "r")


def certified(sources: Sources) -> str:
    """docs/budgets.md: what was certified of whole models, beside the noise floor."""
    names = ("model", "tokens", "mean KL", "next KL below", "noise floor", "top-1 at least", "needles kept", "prefill")
    rows = []
    for source in of_format(sources, CalibrationFile):
        prefills = {entry.length: entry for entry in source.file.lengths}
        for entry in (source.file.certificate or {"lengths": []})["lengths"]:
            prefill = prefills[entry["length"]]
            found = entry["retrieval"]
            cells = [small(entry[name]) for name in ("mean_kl",)]
            cells += [small(entry["kl"]["value"]), small(entry["noise_floor"]), f"{entry['top1']['value']:.1%}"]
            cells += [f"{found['kept']} of {found['found']}" if found else "-"]
            cells += [f"{prefill.dense_prefill_seconds / prefill.prefill_seconds:.2f}x"]
            rows.append([named(source.file.model), str(entry["length"]), *cells])
    return table(names, rows, "lr")


BLOCKS: Mapping[str, Tables] = {
    "README.md": {"comparison": comparison, "crossovers": crossovers},
    "docs/budgets.md": {"quality": quality, "speed": speed, "certified": certified},
}


def marks(name: str) -> tuple[str, str]:
    return f"<!-- table {name}: make tables writes what is between these lines -->", f"<!-- /table {name} -->"


def with_table(text: str, name: str, markdown: str) -> str:
    """A text with a table between its marks. Raises ValueError if it has no marks."""
    start, end = marks(name)
    before, opening, rest = text.partition(start)
    _, closing, after = rest.partition(end)
    if not opening or not closing:
        raise ValueError(f"no lines {start} and {end}: put them where the table belongs")
    return f"{before}{start}\n\n{markdown}\n\n{end}{after}"


def current(sources: Sources, page: str, text: str) -> str:
    """A page's text with all its tables as the raw data has them."""
    for name, make in BLOCKS[page].items():
        text = with_table(text, name, make(sources))
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("scripts.docs.tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a table differs")
    check = parser.parse_args(argv).check
    stale = 0
    try:
        sources = read_sources(ROOT / "docs" / "results")
        for page in BLOCKS:
            text = (ROOT / page).read_text(encoding="utf-8")
            written = current(sources, page, text)
            if written == text:
                continue
            stale += 1
            if check:
                print(f"the tables of {page} are not what docs/results holds: run make tables")
            else:
                write_atomically(ROOT / page, written.encode())
                print(f"wrote {page}")
    except S2OError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return BAD_INPUT
    return int(check and stale > 0) or OK


if __name__ == "__main__":
    sys.exit(main())
