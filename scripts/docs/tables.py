#!/usr/bin/env python3
"""Write tables of the documentation: what was measured, from the raw files in docs/results; options; a record's fields.

    python -m scripts.docs.tables            writes every table between its marker lines, and a picture
    python -m scripts.docs.tables --check    writes nothing, and fails if a table is not what it would write

A block is named by its marker lines, `<!-- table NAME: make tables writes what is between these lines -->` and
`<!-- /table NAME -->`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from calibrate.evaluation import plan
from calibrate.recipe import OPTIONS
from s2o_runtime.errors import S2OError
from s2o_runtime.files import write_atomically
from scripts.bench.boards import differences, identity_of
from scripts.bench.common import BAD_INPUT, OK, Parser
from scripts.bench.first_token import OFF, STOCK, FirstTokenFile, compare_turns
from scripts.bench.schema import AttentionEntry, AttentionFile, PrefillFile
from scripts.docs.fields import between, codes, make_table, options, record
from scripts.docs.first_token_plot import PICTURE, make_picture
from scripts.docs.raw import METHODS, ROOT, S2O, Bench, benches, raw, result_file, three

COMPARED_AT = 1e-3  # the rel_mse at which README compares methods; the calibrator's default budget
DEMO = "bench-methods-demo-h200.json", "the demo model"
REAL = "bench-methods-qwen2.5-coder-1.5b-h100.json", "Qwen2.5-Coder-1.5B"
ANSWERS = (  # s2o-eval on profiles and settings of REAL
    "eval-qwen2.5-coder-1.5b-32768-h100.json",
    "eval-qwen2.5-coder-1.5b-32768-rivals-h100.json",
)
CERTIFIED = {  # of budgets of errors
    "calibrate-qwen2.5-coder-1.5b-h100.json": "Qwen2.5-Coder-1.5B",
    "calibrate-qwen2.5-coder-1.5b-yarn-h200.json": "Qwen2.5-Coder-1.5B (YaRN)",
    "calibrate-smollm2-h200.json": "SmolLM2-135M",
    "calibrate-demo-h200.json": "the demo model",
}
CALIBRATIONS = {
    "calibrate-qwen2.5-coder-1.5b-2e-3-h200.json": "Qwen2.5-Coder-1.5B",
    "calibrate-qwen2.5-coder-1.5b-yarn-kl-h200.json": "Qwen2.5-Coder-1.5B (YaRN)",
    "calibrate-smollm2-kl-h200.json": "SmolLM2-135M",
    "calibrate-demo-kl-h200.json": "the demo model",
}
SERVED = {  # time to the first token: the model, its query heads times head_dim, and the weights of a layer
    "first-token-demo-h100.json": ("demo", 8 * 128, 1.05e6),
    "first-token-qwen2.5-coder-1.5b-yarn-h100.json": ("Qwen2.5-Coder-1.5B (YaRN)", 12 * 128, 46.8e6),
    "first-token-8b-h100.json": ("Llama 3.1 8B's sizes", 32 * 128, 218e6),
}
HOST_FLOPS = 1.2e12  # the version that was measured left requests of less work in a dense layer to the stock backend
CHUNKS = {"faster": 8192, "chunks of 2048": 2048, "of 16384": 16384}  # tokens of a chunk by column
TURNS = "first-token-qwen2.5-coder-1.5b-kl-h200.json"


def compared() -> list[Bench]:
    """Return what README compares methods on: a real model first."""
    return [*benches(*REAL), *(bench for bench in benches(*DEMO) if bench.length > 8192)]


def comparison() -> str:
    """README: how many times faster than cuDNN each method is at one error, and what it answers less than dense."""
    columns = compared()
    asked = next(bench for bench in columns if bench.length == 32768)
    answered = answers(asked)
    rows = []
    for method, name in METHODS.items():
        cells = [bench.faster(bench.within(method, COMPARED_AT)) for bench in columns]
        if method != S2O:  # whose profile is made for the error; the settings of the others come in coarse steps
            between = [bench.faster_between(method, COMPARED_AT) for bench in columns]
            cells = [f"{cell} ({finer})" for cell, finer in zip(cells, between, strict=True)]
        cells.append(answered.get(method, ""))
        rows.append([name, *(f"**{cell}**" if method == S2O and cell != "-" else cell for cell in cells)])
    names = [f"{bench.model}, {bench.length} tokens" for bench in columns]
    return make_table(("method", *names, f"answers, {asked.model}, {asked.length}"), rows, "lr")


def answers(bench: Bench) -> dict[str, str]:
    """Of each method that was asked, the setting that answers most: points against dense, how fast, and its error."""
    best: dict[str, tuple[float, str]] = {}
    for evaluation in map(raw, ANSWERS):
        answered = differences(bench.entry, evaluation)
        for row in bench.entry.rows:
            more = answered.get(identity_of(row))
            if more is not None and (row.method not in best or more > best[row.method][0]):
                best[row.method] = more, f"{100 * more:.1f} at {bench.faster(row)}, {row.rel_mse:.1e}"
    return {method: cell for method, (_, cell) in best.items()}


def crossovers() -> str:
    """README: by length, what the kernel gains when half is computed, and what whole prefills gained."""
    kernels = {entry.length: entry for entry in result_file(AttentionFile, "bench-attention-h200.json").results}
    lengths = sorted(kernels)
    targets: tuple[tuple[str, float | str], ...] = (("every pair", "never stop"), ("half of the pairs", 0.5))
    rows = [
        [f"the kernel, {pairs} computed", *(_speedup(kernels[length], target) for length in lengths)]
        for pairs, target in targets
    ]
    for name, model in CALIBRATIONS.items():
        calibration = raw(name)
        prefills = {entry["length"]: _prefill(entry) for entry in calibration["lengths"]}
        options = "--budget-{kind} {value:g}".format(**calibration["budget"]).replace("_", "-")
        rows.append([f"prefill of {model} with {options} (dense layers)", *(prefills.get(n, "-") for n in lengths)])
    shares: dict[str, dict[int, float]] = {}
    for prefill in result_file(PrefillFile, "bench-prefill-h200.json").results:
        shares.setdefault(prefill.model, {})[prefill.length] = prefill.rows[0].share
    for model, of_model in shares.items():
        cells = [f"{of_model[length]:.0%}" if length in of_model else "-" for length in lengths]
        rows.append([f"share of attention in the dense prefill of {model}", *cells])
    return make_table(("", *(f"{length} tokens" for length in lengths)), rows, "lr")


def _speedup(entry: AttentionEntry, target: float | str) -> str:
    row = next(row for row in entry.rows if row.target == target)
    return f"{entry.dense.seconds.median / row.seconds.median:.2f}x"


def _prefill(entry: Mapping[str, Any]) -> str:
    layers = entry["layers"]
    dense = sum(layer["density"] == 1.0 for layer in layers)
    return f"{_times(entry)} ({dense} of {len(layers)})"


def _times(entry: Mapping[str, Any]) -> str:
    """Return how many times faster a whole prefill became."""
    return f"{entry['dense_prefill_seconds'] / entry['prefill_seconds']:.2f}x"


def speed() -> str:
    """docs/budgets.md: what budgets do to error and speed, at every length that was benched."""
    names = ("model", "tokens", "budget, rel_mse", "density", "rel_mse", "ranking ms", "attending ms", "attention")
    rows = []
    for bench in (*benches(*REAL), *benches(*DEMO)):
        budgets = {float(row.setting.split()[1].rstrip(",")): row for row in bench.of(S2O)}
        for budget, row in sorted(budgets.items()):
            ranking = row.selecting_seconds
            times = [three(1e3 * ranking), three(1e3 * (row.seconds - ranking)), bench.faster(row)]
            errors = [f"{row.density:.3f}", f"{row.rel_mse:.1e}"]
            rows.append([bench.model, str(bench.length), f"{budget:.0e}", *errors, *times])
    return make_table(names, rows, "lr")


def certified() -> str:
    """docs/budgets.md: what certify prompts showed of whole models, beside the noise floor."""
    names = ("model", "tokens", "mean KL", "noise floor", "needles kept", "prefill")
    rows = []
    for name in CERTIFIED:
        calibration = raw(name)
        prefills = {entry["length"]: _times(entry) for entry in calibration["lengths"]}
        for entry in calibration["certificate"]["lengths"]:
            needles, length = entry["retrieval"], entry["length"]
            kls = [f"{entry[key]:.1e}" for key in ("mean_kl", "noise_floor")]
            kept = f"{needles['kept']} of {needles['found']}" if needles else "-"
            rows.append([CERTIFIED[name], str(length), *kls, kept, prefills[length]])
    return make_table(names, rows, "lr")


def first_token() -> str:
    """docs/serving.md: milliseconds to the first token of cold prompts, and how many times faster S2O's engine was.

    A number is bold where S2O took part in a prompt's last chunk. Elsewhere both engines ran the stock backend.
    """
    rows = []
    for file, (model, width, weights) in SERVED.items():
        seconds: dict[tuple[int, int], dict[bool, list[float]]] = {}
        for row in result_file(FirstTokenFile, file).rows:
            kind = row.kind
            if kind.hit == 0 and kind.length in (8192, 32768, 131072):
                medians = seconds.setdefault((kind.length, kind.chunk), {True: [], False: []})
                medians[row.engine == "S2O"].append(row.seconds.median)
        for length in sorted({length for length, _ in seconds}):
            cells = []
            for chunk in CHUNKS.values():
                measured = seconds.get((length, chunk))
                queries = min(chunk, length)
                work = 4 * width * queries * (length - queries / 2) + 2 * queries * weights
                mark = "**" if work >= HOST_FLOPS else ""
                cells.append(f"{mark}{fmean(measured[False]) / measured[True][0]:.2f}x{mark}" if measured else "")
            times = seconds[length, 8192]
            rows.append([model, str(length), *(three(1e3 * fmean(times[s2o])) for s2o in (False, True)), *cells])
    return make_table(("model", "tokens", "stock, ms", "S2O, ms", *CHUNKS), rows, "lr")


def turns() -> str:
    """docs/serving.md: milliseconds to the first token, cold and behind cached ones, with intervals of the ratio."""
    measured = {(row.kind, row.engine): row for row in result_file(FirstTokenFile, TURNS).rows}
    rows = []
    for kind in dict.fromkeys(kind for kind, _ in measured):
        stock, s2o = measured.get((kind, OFF), measured[kind, STOCK]), measured[kind, "S2O"]
        ratio, low, high = compare_turns(stock.turns, s2o.turns)
        sizes = f"{s2o.cached}", f"{kind.length - s2o.cached}", f"{kind.chunk}"
        times = (three(1e3 * engine.seconds.median) for engine in (stock, s2o))
        rows.append([*sizes, *times, f"{ratio:.2f}x ({low:.2f} to {high:.2f})"])
    return make_table(("cached", "new tokens", "chunk", "stock, ms", "S2O, ms", "faster, 95%"), rows, "r")


START, END = "<!-- table {}: make tables writes what is between these lines -->", "<!-- /table {} -->"
BLOCKS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"comparison": comparison, "crossovers": crossovers},
    "docs/budgets.md": {"speed": speed, "certified": certified},
    "docs/options.md": {
        "s2o-calibrate": partial(options, OPTIONS),
        "s2o-eval": partial(options, plan.OPTIONS),
        "exit-codes": codes,
    },
    "s2o_runtime/profile/FORMAT.md": {"record": record},
    "docs/serving.md": {"first-token": first_token, "turns": turns},
}


def current(page: str, text: str) -> str:
    """A page's text with all its tables as the raw data has them."""
    for name, make in BLOCKS[page].items():
        text = between(text, START.format(name), END.format(name), make())
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("scripts.docs.tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a table differs")
    check = parser.parse_args(argv).check
    stale = 0
    try:
        for page in BLOCKS:
            text = (ROOT / page).read_text(encoding="utf-8")
            written = current(page, text)
            if written == text:
                continue
            stale += 1
            if check:
                print(f"the tables of {page} are not what they would be now: run make tables")
            else:
                write_atomically(ROOT / page, written.encode())
                print(f"wrote {page}")
        if not check:
            write_atomically(PICTURE, make_picture())
    except S2OError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return BAD_INPUT
    return int(check and stale > 0) or OK


if __name__ == "__main__":
    sys.exit(main())
