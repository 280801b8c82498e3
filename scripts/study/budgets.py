#!/usr/bin/env python3
"""What a budget buys: needles found, error and time of calibrated profiles, for budgets and guards on worst rows.

    python -m scripts.study.budgets [--length 32768] [--budgets 1e-3,1e-2] [--worst-rows 0.5,0.8,off] [--out FILE.json]

One journal serves all calibrations, so the curves are measured once. No profile is refused, so that the table shows
what each loses.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

import torch

from calibrate.pipeline import calibrate
from calibrate.recipe import Budget, Recipe
from calibrate.report.contents import report_of
from calibrate.versions import now, versions
from scripts.bench.common import Parser, add_device, bench_parser, check_device, checked, run_command
from scripts.bench.schema import BudgetRow, BudgetsFile, write

NAME = "scripts.study.budgets"


def parser() -> Parser:
    out, add = bench_parser(NAME, __doc__)
    numbers = checked(optional_numbers, "0.5,off")
    add("--model", "demo", "an alias, a local folder, or a hub id", metavar="NAME")
    add("--length", 32768, type=int, metavar="N")
    add("--budgets", "1e-3,2e-3,5e-3,1e-2,2e-2", "rel_mse", type=numbers, metavar="X,X")
    add("--worst-rows", "0.5,0.8,off", "guards on worst rows", type=numbers, metavar="X,X")
    add("--representatives", "1,32,64", type=numbers, metavar="N,N")
    add("--held-out", 8, "prompts of the proof", type=int, metavar="N")
    add("--trials", 8, "of the search", type=int, metavar="N")
    add_device(add)
    add("--out", Path("build/study_budgets.json"), type=Path, metavar="FILE")
    return out


def optional_numbers(text: str) -> list[float | None]:
    """Numbers separated by commas; "off" is None."""
    return [None if part == "off" else float(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run_command(NAME, args.out, lambda: study(args), "a shorter --length")


def study(args: argparse.Namespace) -> None:
    """Calibrate for every budget and guard, print a row for each, and write what there is so far to --out."""
    check_device(args)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    file = BudgetsFile(model=args.model, length=args.length, device=device, versions=versions(), date=now(), rows=[])
    with tempfile.TemporaryDirectory() as folder:
        base = Recipe(
            args.model,
            Budget("rel_mse", 1e-3),
            (args.length,),
            Path(folder) / "profile.safetensors",
            domains=("code",),
            held_out=args.held_out,
            num_certify=0,
            trials=args.trials,
            device=args.device,
            representatives=tuple(int(number) for number in args.representatives if number is not None),
            needles=0.0,
            allow_regression=True,
        )
        print("   budget  worst rows   needles  density   rel_mse        KL  attention")
        for budget, worst_rows in product(args.budgets, args.worst_rows):
            file.rows.append(proven(replace(base, budget=Budget("rel_mse", budget), worst_rows=worst_rows)))
            print_row(file.rows[-1])
            write(args.out, file)


def proven(recipe: Recipe) -> BudgetRow:
    """Calibrate, and return what the proof measured."""
    length = report_of(recipe, calibrate(recipe.validate(), progress=False)).to_json()["lengths"][0]
    return BudgetRow(
        budget=recipe.budget.value,
        worst_rows=recipe.worst_rows,
        needles=length["needles"],
        density=fmean(layer["density"] for layer in length["layers"]),
        rel_mse=fmean(layer["held_out_rel_mse"] for layer in length["layers"]),
        kl=length["kl"],
        top1=length["top1"],
        attention_seconds=length["attention_seconds"],
        dense_attention_seconds=length["dense_attention_seconds"],
    )


def print_row(row: BudgetRow) -> None:
    speedup = "-"
    if row.attention_seconds and row.dense_attention_seconds:
        speedup = f"{row.dense_attention_seconds / row.attention_seconds:.2f}x"
    guard = "off" if row.worst_rows is None else f"{row.worst_rows:g}"
    needles = "{} of {}".format(*(row.needles or (0, 0)))
    numbers = f"{row.density:8.3f} {row.rel_mse:9.2e} {row.kl:9.2e}"
    print(f"{row.budget:9.0e} {guard:>11} {needles:>10} {numbers} {speedup:>10}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
