#!/usr/bin/env python3
"""What a budget buys: needles found, error and time of calibrated profiles, for budgets and guards on worst rows.

    python scripts/study_budgets.py [--length 32768] [--budgets 1e-3,1e-2] [--worst-rows 0.5,0.8,off] [--out FILE.json]

One journal serves all: the curves are measured once. Nothing is refused here, so that what a profile loses is seen.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from calibrate.outcome import summary
from calibrate.pipeline import calibrate
from calibrate.recipe import Budget, Recipe
from calibrate.versions import now, versions
from s2o_runtime import S2OError
from s2o_runtime.profile import write_atomically


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--budgets", type=numbers, default=numbers("1e-3,2e-3,5e-3,1e-2,2e-2"), help="rel_mse")
    parser.add_argument("--worst-rows", type=numbers, default=numbers("0.5,0.8,off"))
    parser.add_argument("--representatives", type=numbers, default=numbers("1,32,64"))
    parser.add_argument("--held-out", type=int, default=8)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            base = Recipe(
                args.model,
                Budget("rel_mse", 1e-3),
                (args.length,),
                Path(folder) / "profile.safetensors",
                held_out=args.held_out,
                trials=args.trials,
                device=args.device,
                representatives=tuple(int(each) for each in args.representatives if each is not None),
                needles=0.0,
                allow_regression=True,
            )
            print("   budget  worst rows   needles  density   rel_mse        KL  attention")
            rows = [row(base, *pair) for pair in product(args.budgets, args.worst_rows)]
    except S2OError as error:
        print(f"study_budgets: {error}", file=sys.stderr)
        return 2
    if args.out is not None:
        device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
        found = {
            "date": now(),
            "model": args.model,
            "length": args.length,
            "device": device,
            "versions": versions(),
            "rows": rows,
        }
        write_atomically(args.out, json.dumps(found, indent=1).encode())
    return 0


def row(base: Recipe, budget: float, worst_rows: float | None) -> dict[str, object]:
    """Calibrate for one budget, print and return what the proof found."""
    recipe = replace(base, budget=Budget("rel_mse", budget), worst_rows=worst_rows).validate()
    length = summary(recipe, calibrate(recipe, progress=False))["lengths"][0]
    layers = length["layers"]
    found = {
        "budget": budget,
        "worst_rows": worst_rows,
        "needles": length["needles"],
        "density": sum(layer["density"] for layer in layers) / len(layers),
        "rel_mse": sum(layer["held_out_rel_mse"] for layer in layers) / len(layers),
        "kl": length["kl"],
        "top1": length["top1"],
        "attention_seconds": length["attention_seconds"],
        "dense_attention_seconds": length["dense_attention_seconds"],
    }
    seconds, dense = length["attention_seconds"], length["dense_attention_seconds"]
    speedup = "-" if seconds is None else f"{dense / seconds:.2f}x"
    guard = "off" if worst_rows is None else f"{worst_rows:g}"
    needles = "{} of {}".format(*(length["needles"] or (0, 0)))
    print(
        f"{budget:9.0e} {guard:>11} {needles:>10} {found['density']:8.3f} {found['rel_mse']:9.2e} {length['kl']:9.2e} "
        f"{speedup:>10}",
        flush=True,
    )
    return found


def numbers(text: str) -> list[float | None]:
    """ "0.5,off" -> [0.5, None]"""
    try:
        return [None if part == "off" else float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers: try 0.5,off") from None


if __name__ == "__main__":
    sys.exit(main())
