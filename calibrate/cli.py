"""s2o-calibrate: flags -> Recipe -> profile. Nothing heavy is imported before the flags are known to be good."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from calibrate.recipe import Budget, Recipe, default_out
from s2o_runtime import __version__
from s2o_runtime.errors import ConfigError, S2OError

OK, BAD_INPUT, NOT_PROVEN = 0, 2, 3
DEFAULT_LENGTHS = {"cuda": (8192, 32768), "cpu": (1024, 2048)}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")


def parser() -> Parser:
    out = Parser(
        prog="s2o-calibrate",
        description="Calibrate S2O sparse attention for a model on this machine and write a profile.",
        epilog="Exit codes: 0 a profile was written, 2 bad input, 3 the held-out proof failed and nothing was written.",
    )
    add = out.add_argument
    add("--model", required=True, help="an alias such as demo or qwen2.5-7b, a local folder, or a hub id")
    budget = out.add_mutually_exclusive_group()
    budget.add_argument("--budget-mse", type=_number, metavar="X", help="mean squared error allowed per layer")
    budget.add_argument(
        "--budget-rel-mse", type=_number, metavar="X", help="the same relative to the dense output (default 1e-3)"
    )
    add("--lengths", type=_lengths, metavar="N,N", help="prompt lengths (default 8192,32768; on a CPU 1024,2048)")
    add("--prompts", type=Path, metavar="FILE.jsonl", help="your prompts (default: the standard library's sources)")
    add("--num-prompts", type=int, default=4, metavar="N", help="prompts of each length to calibrate on (default 4)")
    add("--held-out", type=int, default=2, metavar="N", help="prompts of each length to prove on (default 2)")
    add("--trials", type=int, default=16, metavar="N", help="Optuna trials for each layer and length (default 16)")
    add("--representatives", type=_counts, default=(1, 32), metavar="N,N", help="to choose from (default 1,32)")
    add("--grains", type=_counts, default=(4,), metavar="N,N", help="to choose from (default 4)")
    add("--margin", type=float, default=0.8, metavar="X", help="share of the budget to spend (default 0.8)")
    add("--seed", type=int, default=0, metavar="N", help="seed of prompts and search (default 0)")
    add("--device", metavar="NAME", help="cuda, cuda:1 or cpu (default: a GPU if there is one)")
    add("--out", type=Path, metavar="FILE", help="default profiles/<model>/<gpu>/<budget>.safetensors")
    add("--dry-run", action="store_true", help="print the plan and stop")
    add("--json", action="store_true", help="print plan or result as JSON")
    add("--quiet", action="store_true", help="no progress bar")
    add("--verbose", action="store_true", help="log decisions to stderr")
    add("--version", action="version", version=f"s2o {__version__}")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(name)s: %(message)s")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        return _run(args)
    except S2OError as error:
        print(f"s2o-calibrate: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("s2o-calibrate: interrupted; nothing was written", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    budget = _budget(args)
    if args.prompts is not None and not args.prompts.is_file():
        raise ConfigError(f"prompt file {args.prompts} does not exist: check the path")
    _check_writable(args.out or default_out(args.model, "gpu", budget))

    from calibrate.models import load_config
    from s2o_runtime.identity import geometry

    config = load_config(args.model)
    recipe, device_name = _recipe(args, budget)

    from rich.console import Console

    from calibrate.pipeline import calibrate
    from calibrate.report import plan, print_plan, print_tables, summary

    recipe.check_limit(int(config.max_position_embeddings))
    console = Console(stderr=args.json, width=None if sys.stdout.isatty() else 120)
    the_plan = plan(recipe, geometry(config), device_name)
    if args.dry_run and args.json:
        print(json.dumps(the_plan, indent=1))
        return OK
    print_plan(the_plan, console)
    if args.dry_run:
        return OK
    result = calibrate(recipe, progress=not args.quiet)
    outcome = summary(recipe, result)
    if args.json:
        print(json.dumps(outcome, indent=1))
    else:
        print_tables(outcome, console)
    if not result.met:
        print(
            "s2o-calibrate: the held-out error is over budget, so no profile was written: allow more error, "
            "calibrate on more prompts (--num-prompts), or spend less of the budget (--margin)",
            file=sys.stderr,
        )
        return NOT_PROVEN
    console.print(f"wrote {recipe.out} in {result.seconds:.0f} s", highlight=False, soft_wrap=True)
    return OK


def _budget(args: argparse.Namespace) -> Budget:
    if args.budget_mse is not None:
        return Budget("mse", args.budget_mse).validate()
    return Budget("rel_mse", 1e-3 if args.budget_rel_mse is None else args.budget_rel_mse).validate()


def _recipe(args: argparse.Namespace, budget: Budget) -> tuple[Recipe, str]:
    """The validated recipe and the device's name."""
    import torch

    from s2o_runtime.gpu import identify

    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is not known: use cuda, cuda:N or cpu") from None
    if device.type not in DEFAULT_LENGTHS:
        raise ConfigError(f"device {name!r} is not supported: use cuda or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is not here ({torch.cuda.device_count()} GPUs found): use --device cpu")
    identity = identify(device)
    recipe = Recipe(
        model=args.model,
        budget=budget,
        lengths=args.lengths or DEFAULT_LENGTHS[device.type],
        out=args.out or default_out(args.model, identity.name, budget),
        prompts=args.prompts,
        num_prompts=args.num_prompts,
        held_out=args.held_out,
        seed=args.seed,
        trials=args.trials,
        margin=args.margin,
        device=name,
        representatives=args.representatives,
        grains=args.grains,
    )
    return recipe.validate(), str(identity)


def _check_writable(path: Path) -> None:
    """Fail before the work, not after it, if the profile cannot be written there."""
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder: give a file name")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written ({error.strerror}): choose another folder") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: try 1e-4") from None


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return _integers(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of lengths: try 8192,32768") from None


def _counts(text: str) -> tuple[int, ...]:
    try:
        return _integers(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers: try 1,4") from None


def _integers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(part) for part in text.split(",")}))


if __name__ == "__main__":
    sys.exit(main())
