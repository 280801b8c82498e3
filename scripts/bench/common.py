"""The shared part of the benches' and studies' command lines: options, the machine's description, failures."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calibrate.versions import format_now
from s2o_runtime.command_line import BAD_INPUT, OK, Parser
from s2o_runtime.devices import identify
from s2o_runtime.errors import ConfigError, S2OError
from scripts.bench.schema import Spread

__all__ = ["BAD_INPUT", "OK", "Parser"]  # of the commands' own command line


def bench_parser(name: str, doc: str | None) -> tuple[Parser, Callable[..., None]]:
    """A parser, and a function that adds an option to it whose help ends with its default.

    Args:
        name: the command's module, such as scripts.bench.attention; error messages begin with it.
        doc: the help's text.

    Returns:
        The parser, and `add(flag, default, help, **options of add_argument)`.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(name, description=doc, formatter_class=raw, epilog="Exit codes: 0 done, 2 bad input.")

    def add(flag: str, default: Any = None, help: str = "", **options: Any) -> None:
        parser.add_argument(flag, default=default, help=f"{help} (default %(default)s)".strip(), **options)

    return parser, add


def add_machine(add: Callable[..., None], out: str) -> None:
    """Add --device, and --out with this file in build/ by default."""
    add("--device", "cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    add("--out", Path("build") / out, type=Path, metavar="FILE")


def check_device(args: argparse.Namespace) -> None:
    """Raises ConfigError if --device names a GPU that is not there."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda is not here: use --device cpu")


def check_least(args: argparse.Namespace, least: int, *names: str) -> None:
    """Raises ConfigError if one of these options is below `least`."""
    for name in names:
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}: use at least {least}")


def checked(parse: Callable[[str], Any], example: str) -> Callable[[str], Any]:
    """An option's type whose error is one sentence with an example."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, OSError):
            raise argparse.ArgumentTypeError(f"{text!r} is not understood: try {example}") from None

    return convert


def int_list(example: str) -> Callable[[str], Any]:
    """An option's type: different integers in ascending order, separated by commas."""
    return checked(lambda text: tuple(sorted({int(part) for part in text.split(",")})), example)


def float_list(example: str) -> Callable[[str], Any]:
    """An option's type: different numbers in ascending order, separated by commas."""
    return checked(lambda text: tuple(sorted({float(part) for part in text.split(",")})), example)


def machine(device: torch.device) -> dict[str, Any]:
    """The fields of a `ResultFile`: when, on what and with which versions something is measured."""
    return {
        "date": format_now(),
        "device": asdict(identify(device)),
        "versions": {name: str(import_module(name).__version__) for name in ("torch", "triton")},
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }


def spread(seconds: list[float]) -> Spread:
    """The quartiles of some times."""
    return Spread(*quantiles(seconds, 0.25, 0.5, 0.75))


def quantiles(seconds: list[float], *shares: float) -> list[float]:
    """The times that these shares are below; 0 where there are none."""
    return [float(value) for value in np.quantile(seconds or [0.0], shares)]


def run_command(
    parser: Parser, argv: Sequence[str] | None, measure: Callable[[argparse.Namespace], None], smaller: str
) -> int:
    """Measure what the options say, which writes --out; print that, or one sentence, and return the exit code.

    smaller: what to use where the GPU's memory runs out.
    """
    args = parser.parse_args(argv)
    out: Path = args.out
    try:
        if out.is_dir():
            raise ConfigError(f"--out {out} is a folder: give a file name")
        out.parent.mkdir(parents=True, exist_ok=True)
        measure(args)
    except S2OError as error:
        problem = str(error)
    except ModuleNotFoundError as error:
        problem = f"{error.name} is not installed: run pip install -e '.[calibrate,dev]'"
    except torch.OutOfMemoryError:
        problem = f"the GPU's memory is too small for these sizes: use {smaller}"
    except OSError as error:
        problem = f"{error.filename} cannot be written ({error.strerror}): give another --out"
    else:
        print(f"wrote {out}")
        return OK
    print(f"{parser.prog}: {problem}", file=sys.stderr)
    return BAD_INPUT
