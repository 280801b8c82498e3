"""s2o-calibrate: flags -> Recipe -> profile. Nothing heavy is imported before the flags are known to be good."""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from calibrate.recipe import (
    DEFAULT_BUDGET,
    METHODS,
    OPTIONS,
    Budget,
    Recipe,
    default_out,
    load_yaml,
    merged,
    seconds,
    slug,
)
from s2o_runtime import __version__
from s2o_runtime.config import MAX_SEGMENT
from s2o_runtime.errors import ConfigError, S2OError

if TYPE_CHECKING:
    from s2o_runtime.gpu import DeviceIdentity

PROGRAM = "s2o-calibrate"
OK, BAD_INPUT, NOT_PROVEN, INTERRUPTED = 0, 2, 3, 130
DEFAULT_LENGTHS = {"cuda": (8192, 32768), "cpu": (1024, 2048)}
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# the modes that change a profile, and the options that each takes
MODES = {
    "rebudget": ("budget_mse", "budget_rel_mse", "worst_rows", "journal", "out"),
    "retile": ("device", "out"),
}

Flags = Mapping[str, Any]  # the flags that were given, by their name with underscores


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")


def parser() -> Parser:
    """The flags. What is not given is left out of the namespace; the defaults are those of `Recipe`."""
    out = Parser(
        prog=PROGRAM,
        argument_default=argparse.SUPPRESS,
        description="Calibrate S2O sparse attention for a model on this machine and write a profile.",
        epilog="Exit codes: 0 a profile was written, 2 bad input, 3 the held-out proof failed and nothing was written, "
        "130 interrupted. A run that was interrupted continues when the same command is run again.",
    )
    number = _reader(float, "a number", "1e-4")
    lengths = _reader(_integers, "a list of lengths", "8192,32768")
    counts = _reader(_integers, "a list of numbers", "1,4")
    what = out.add_argument_group("what to calibrate").add_argument
    what("--recipe", type=Path, metavar="FILE.yaml", help="options by the names of these flags, which override them")
    what("--model", help="an alias such as demo or qwen2.5-7b, a local folder, or a hub id")
    what("--random-weights", action=argparse.BooleanOptionalAction, help="the model's architecture without its weights")
    what("--lengths", type=lengths, metavar="N,N", help=f"prompt lengths (default {_lengths_default()})")
    what("--prompts", type=Path, metavar="FILE.jsonl", help="your prompts (default: the standard library's sources)")
    what("--num-prompts", type=int, metavar="N", help=_help("prompts of each length to calibrate on", "num_prompts"))
    what("--seed", type=int, metavar="N", help=_help("seed of prompts and search", "seed"))
    what("--device", metavar="NAME", help="cuda, cuda:1 or cpu (default: a GPU if there is one)")

    allowed = out.add_argument_group("what error is allowed, and how it is proven")
    budget = allowed.add_mutually_exclusive_group()
    budget.add_argument("--budget-mse", type=number, metavar="X", help="mean squared error allowed per layer")
    budget.add_argument(
        "--budget-rel-mse",
        type=number,
        metavar="X",
        help=f"the same relative to the dense output (default {DEFAULT_BUDGET.value:g})",
    )
    proof = allowed.add_argument
    proof("--budget-scope", metavar="layer|model", help=_help("what the budget holds for", "scope"))
    proof("--margin", type=number, metavar="X", help=_help("share of the budget to spend", "margin"))
    proof("--worst-rows", type=number, metavar="X", help=_help("allowed in the worst rows; 0: off", "worst_rows"))
    proof("--needles", type=number, metavar="X", help=_help("share of the needles to keep", "needles"))
    proof("--held-out", type=int, metavar="N", help=_help("prompts of each length to prove on", "held_out"))
    proof(
        "--check-lengths",
        type=_reader(_integers_or_none, "a list of lengths", "16384, or none"),
        metavar="N,N",
        help="lengths to prove without calibrating them (default: one between any two), or none",
    )
    proof(
        "--allow-regression",
        action=argparse.BooleanOptionalAction,
        help="write a profile even if its proof fails",
    )

    space = out.add_argument_group("what to choose from, and for how long").add_argument
    space("--method", choices=METHODS, help=_help("what computes a head; auto: what is cheapest", "method"))
    space("--segments", type=counts, metavar="N,N", help=_help("queries that share a ranking", "segments"))
    space("--representatives", type=counts, metavar="N,N", help=_help("of a segment", "representatives"))
    space("--grains", type=counts, metavar="N,N", help=_help("keys ranked together", "grains"))
    space(
        "--tails",
        type=_reader(_switches, "on, off or both", "on,off"),
        metavar="on,off",
        help="estimates of what is skipped (default on,off)",
    )
    space("--trials", type=int, metavar="N", help=_help("Optuna trials for each layer and length", "trials"))
    space(
        "--time-limit",
        type=_reader(seconds, "a duration", "90, 5m or 1h"),
        metavar="SECONDS",
        help="for the whole search; 5m and 1h work too (default: none)",
    )

    modes = out.add_argument_group("instead of calibrating").add_mutually_exclusive_group()
    modes.add_argument("--rebudget", type=Path, metavar="PROFILE", help="another budget, from what was measured")
    modes.add_argument("--retile", type=Path, metavar="PROFILE", help="the same thresholds with tiles for this GPU")

    output = out.add_argument_group("output").add_argument
    output("--out", type=Path, metavar="FILE", help="default profiles/<model>/<gpu>/<budget>.safetensors")
    output("--journal", type=Path, metavar="FILE", help="the measurements (default <model>.journal.jsonl beside --out)")
    output("--dry-run", action="store_true", help="print the plan and stop")
    output("--json", action="store_true", help="print plan or result as JSON")
    output("--quiet", action="store_true", help="no progress bar")
    output("--verbose", action="store_true", help="log decisions to stderr")
    output("--version", action="version", version=f"s2o {__version__}")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(PROGRAM, vars(parser().parse_args(argv)), _run, "nothing was written")


def exit_code(program: str, flags: Flags, run: Callable[[Flags], int], if_interrupted: str) -> int:
    """What `run` returns; what it raises is one sentence and a code. Logs as the flags say."""
    level = logging.INFO if "verbose" in flags else logging.WARNING
    logging.getLogger("s2o_runtime").setLevel(logging.WARNING)  # what each of many layers runs is not news here
    logging.basicConfig(level=level, format="%(name)s: %(message)s")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(flags)
    except S2OError as error:
        code, sentence = BAD_INPUT, " ".join(str(error).split())
    except KeyboardInterrupt:
        code, sentence = INTERRUPTED, f"interrupted; {if_interrupted}"
    print(f"{program}: {sentence}", file=sys.stderr)
    return code


def _fail(code: int, sentence: str) -> int:
    print(f"{PROGRAM}: {sentence}", file=sys.stderr)
    return code


def _run(flags: Flags) -> int:
    for mode, allowed in MODES.items():
        if mode in flags:
            _check_mode(mode, allowed, flags)
    if "rebudget" in flags:
        return _rebudget(flags)
    if "retile" in flags:
        return _retile(flags)
    return _calibrate(flags)


def _calibrate(flags: Flags) -> int:
    file = load_yaml(flags["recipe"]) if "recipe" in flags else {}
    options = merged(file, {name: value for name, value in flags.items() if name in OPTIONS})
    draft = _draft(options)

    from calibrate.models import load_config
    from s2o_runtime.identity import geometry

    config = load_config(draft.model, random_weights=draft.random_weights)
    recipe, device = _on_this_machine(draft, options)

    from rich.console import Console

    from calibrate.outcome import summary
    from calibrate.pipeline import calibrate
    from calibrate.report import plan, print_plan, print_tables, write_report

    recipe.check_limit(int(config.max_position_embeddings))
    console = Console(stderr="json" in flags, width=None if sys.stdout.isatty() else 120)
    the_plan = plan(recipe, geometry(config), str(device), frozenset(options))
    if "dry_run" in flags and "json" in flags:
        print(json.dumps(the_plan, indent=1))
        return OK
    print_plan(the_plan, console)
    if "dry_run" in flags:
        return OK
    try:
        with _writing(recipe.out):
            result = calibrate(recipe, progress="quiet" not in flags)
    except KeyboardInterrupt:
        if not recipe.journal_path.exists():
            raise
        return _fail(
            INTERRUPTED,
            "interrupted; run the same command to continue: everything measured so far is kept in "
            f"{recipe.journal_path}",
        )
    outcome = summary(recipe, result) | {"command": shlex.join(["s2o-calibrate", *sys.argv[1:]])}
    with _writing(recipe.out):
        reports = write_report(outcome, recipe.out)
    if "json" in flags:
        print(json.dumps(outcome, indent=1))
    else:
        print_tables(outcome, console)
    if not result.written:
        return _fail(
            NOT_PROVEN,
            f"the proof failed, so no profile was written ({result.problems[0]}): allow more error, calibrate on more "
            "prompts (--num-prompts), or write it all the same with --allow-regression",
        )
    took = outcome["calibration_seconds"]
    console.print(f"wrote {recipe.out} in {took:.0f} s", highlight=False, soft_wrap=True)
    console.print(f"wrote the report {reports[-1]}", highlight=False, soft_wrap=True)
    return OK


def _rebudget(flags: Flags) -> int:
    """Spend another budget on what was measured for a profile; no model is loaded."""
    if not {"budget_mse", "budget_rel_mse"} & set(flags):
        raise ConfigError("--rebudget needs the new budget: give --budget-mse or --budget-rel-mse")
    profile, budget = flags["rebudget"], Budget.of(flags)
    guard = flags.get("worst_rows")
    out = flags.get("out", profile.parent / f"{budget}{'' if guard is None else f'-rows-{guard:g}'}.safetensors")
    _check_writable("--out", out)

    from calibrate.rebudget import rebudget

    with _writing(out):
        rebudget(profile, budget, out, flags.get("journal"), guard)
    return _say_written(out, flags)


def _retile(flags: Flags) -> int:
    """Tune a profile's tiles for the device here; its thresholds stay."""
    profile = flags["retile"]
    name, device = named_device(flags.get("device"))
    out = flags.get("out", profile.parent / f"{profile.stem}-{slug(device.name)}.safetensors")
    _check_writable("--out", out)

    from calibrate.retile import retile

    with _writing(out):
        retile(profile, name, out)
    return _say_written(out, flags)


def _say_written(out: Path, flags: Flags) -> int:
    print(json.dumps({"out": str(out)}, indent=1) if "json" in flags else f"wrote {out}")
    return OK


def _check_mode(mode: str, allowed: Sequence[str], flags: Flags) -> None:
    """Raises ConfigError naming a flag that a mode does not take, or a profile that is not there."""
    for name in ("recipe", "dry_run", *OPTIONS):
        if name in flags and name not in allowed:
            takes = ", ".join(_flag(each) for each in allowed)
            raise ConfigError(f"{_flag(mode)} takes only {takes}: leave {_flag(name)} out")
    if not flags[mode].is_file():
        raise ConfigError(f"{_flag(mode)} {flags[mode]} is not a file: check the path")


def _draft(options: Mapping[str, Any]) -> Recipe:
    """The recipe as far as it is known without torch, validated, its files checked."""
    if "model" not in options:
        raise ConfigError("--model is missing: give an alias such as demo, a local folder, or a hub id")
    out = default_out(options["model"], "gpu", Budget.of(options))
    unknown = {} if "lengths" in options else {"lengths": (MAX_SEGMENT,), "check_lengths": None}  # the device decides
    draft = Recipe.of({"out": out} | dict(options) | unknown)
    if draft.prompts is not None and not draft.prompts.is_file():
        raise ConfigError(f"prompt file {draft.prompts} does not exist: check the path")
    _check_writable("--out", draft.out)
    _check_writable("--journal", draft.journal_path)
    return draft


def _on_this_machine(draft: Recipe, options: Mapping[str, Any]) -> tuple[Recipe, DeviceIdentity]:
    """The recipe with the defaults that depend on the device."""
    name, identity = named_device(options.get("device"))
    defaults = {
        "lengths": DEFAULT_LENGTHS[identity.kind],
        "out": default_out(draft.model, identity.name, draft.budget),
    }
    return Recipe.of(defaults | dict(options) | {"device": name}), identity


def named_device(name: str | None) -> tuple[str, DeviceIdentity]:
    """A device's name, by default a GPU's if there is one, and which it is. Raises ConfigError if it is not here."""
    import torch

    from s2o_runtime.gpu import identify

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is not known: use cuda, cuda:N or cpu") from None
    if device.type not in DEFAULT_LENGTHS:
        raise ConfigError(f"device {name!r} is not supported: use cuda or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is not here ({torch.cuda.device_count()} GPUs found): use --device cpu")
    if (identity := identify(device)).kind not in DEFAULT_LENGTHS:
        raise ConfigError(f"device {name!r} is a {identity.kind} device, which has no kernels yet: use --device cpu")
    return name, identity


def _check_writable(flag: str, path: Path) -> None:
    """Fail before the work, not after it, if a file cannot be written there."""
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder: give a file name")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written ({error.strerror}): choose another folder") from None


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Where `out` is made: a disk that does not take it is one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        from calibrate.journal import write_failure

        raise write_failure(error.filename or out, error) from error


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _help(text: str, field: str) -> str:
    """A flag's help with the default of the recipe's field."""
    default = getattr(Recipe, field)
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{text} (default {shown})"


def _lengths_default() -> str:
    on = {kind: ",".join(map(str, lengths)) for kind, lengths in DEFAULT_LENGTHS.items()}
    return f"{on['cuda']}; on a CPU {on['cpu']}"


def _reader(read: Callable[[str], Any], kind: str, example: str) -> Callable[[str], Any]:
    """A flag's type whose error is one sentence."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}: try {example}") from None

    return convert


def _integers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(part) for part in text.split(",")}))


def _integers_or_none(text: str) -> tuple[int, ...]:
    return () if text == "none" else _integers(text)


def _switches(text: str) -> tuple[bool, ...]:
    return tuple(sorted({bool(("off", "on").index(part.strip())) for part in text.split(",")}))


if __name__ == "__main__":
    sys.exit(main())
