"""s2o-profile: look into profiles, compare them, prove them again, draw them and pass them on."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from calibrate.cli import BAD_INPUT, INTERRUPTED, NOT_PROVEN, OK, Parser
from s2o_runtime import __version__
from s2o_runtime.errors import ConfigError, S2OError

if TYPE_CHECKING:
    from s2o_runtime.profile import Profile

WIDTH = 120


def parser() -> argparse.ArgumentParser:
    out = Parser(
        prog="s2o-profile",
        description="Look into S2O profiles, compare them, prove them again, draw them and pass them on.",
        epilog="Exit codes: 0 done, 2 bad input, 3 the proof failed.",
    )
    out.add_argument("--version", action="version", version=f"s2o {__version__}")
    commands = out.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, *places: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        for place in places:
            made.add_argument(place, metavar=place.upper(), type=str if place in ("model", "to", "source") else Path)
        made.add_argument("--json", action="store_true", help="print the result as JSON")
        return made

    show = command("show", "What a profile does and what was proven of it.", "profile")
    show.add_argument("--head", type=_head, metavar="LAYER.HEAD", help="what one head does at every length, and why")
    show.add_argument("--journal", type=Path, metavar="FILE", help="the measurements (default: beside the profile)")
    command("diff", "What differs between two profiles.", "a", "b")
    export = command("export", "Everything in a profile as JSON.", "profile")
    export.add_argument("--out", type=Path, metavar="FILE.json", help="default: standard output")
    verify = command("verify", "Prove a profile on held-out prompts here.", "model", "profile")
    verify.add_argument("--device", metavar="NAME", help="cuda, cuda:1 or cpu (default: a GPU if there is one)")
    verify.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="where the recipe's prompts are")
    plot = command("plot", "A picture of every head's threshold.", "profile")
    plot.add_argument("--out", type=Path, metavar="FILE.png", help="default <profile>.tau.png")
    push = command("push", "Copy a profile, its card and its report to a folder or hf://org/name.", "profile", "to")
    push.add_argument("--shelf", action="store_true", help="the folder is a shelf: by model and device, with an index")
    pull = command("pull", "Fetch a profile and its report from a folder, a file or hf://org/name.", "source")
    pull.add_argument("--out", type=Path, metavar="FOLDER", default=Path(), help="default: here")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        return int(COMMANDS[args.command](args))
    except S2OError as error:
        return _fail(BAD_INPUT, str(error))
    except OSError as error:
        return _fail(BAD_INPUT, f"{error.filename or 'a file'} cannot be written or read ({error.strerror or error})")
    except KeyboardInterrupt:
        return _fail(INTERRUPTED, "interrupted")


def _fail(code: int, sentence: str) -> int:
    print(f"s2o-profile: {' '.join(sentence.split())}", file=sys.stderr)
    return code


def _head(text: str) -> tuple[int, int]:
    layer, dot, head = text.partition(".")
    if not (dot and layer.isascii() and head.isascii() and layer.isdigit() and head.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a layer and a head: try 3.7")
    return int(layer), int(head)


def show(args: argparse.Namespace) -> int:
    """The summary of a profile, or one head of it."""
    from calibrate.card import COLUMNS, length_cells
    from calibrate.summary import summary
    from s2o_runtime.profile import load_profile

    profile = load_profile(args.profile)
    if args.head is not None:
        return _show_head(args, profile)
    found = summary(profile)
    if args.json:
        return _print_json(found)
    for name in ("model", "architecture", "device", "budget", "objective", "proof"):
        _print(f"{name:<12}  {found[name] or 'not recorded'}")
    for problem in found["problems"]:
        _print(f"not proven: {problem}")
    if found["retiled"]:
        _print(f"{found['retiled']}")
    _print_table("", COLUMNS, [length_cells(row) for row in found["lengths"]])
    _print(f"prompts below {profile.min_length} tokens stay dense")
    return OK


def _show_head(args: argparse.Namespace, profile: Profile) -> int:
    from calibrate.explain import explain_head

    layer, head = args.head
    geometry = profile.geometry
    if layer >= geometry.layers or head >= geometry.query_heads:
        raise ConfigError(
            f"head {layer}.{head} does not exist: layers are 0 to {geometry.layers - 1}, heads 0 to "
            f"{geometry.query_heads - 1}"
        )
    found = explain_head(profile, args.profile, layer, head, args.journal)
    if args.json:
        return _print_json({"layer": layer, "head": head, "lengths": found})
    for row in found:
        _print(f"{row['length']} tokens: {_settings(row)}")
        if row["density"] is not None:
            _print(f"  predicted density {row['density']:.3f}, error {row['error']:.2e} {row['unit']}")
        _print(f"  {row['why']}")
    return OK


def _settings(row: Mapping[str, Any]) -> str:
    if row["mode"] == "dense":
        return "dense"
    if row["blocks"] is not None:
        return f"{row['blocks']}, tile {row['tile']}"
    tail = ", tail" if row["tail"] else ""
    return (
        f"tau {row['tau']:.3g} ({row['threshold']}), segment {row['segment']}, repr. {row['representatives']}{tail}, "
        f"grain {row['grain']}, tile {row['tile']}"
    )


def diff(args: argparse.Namespace) -> int:
    """What differs between two profiles."""
    from calibrate.compare import differences
    from s2o_runtime.profile import load_profile

    found = differences(load_profile(args.a), load_profile(args.b))
    if args.json:
        return _print_json(found)
    if not any(found.values()):
        _print("the profiles are the same")
        return OK
    _print_table("fields", ("field", "a", "b"), [[n, _short(a), _short(b)] for n, (a, b) in found["fields"].items()])
    for name, lengths in found["lengths"].items():
        if lengths:
            _print(f"lengths in {name.removeprefix('only_')} only: {', '.join(map(str, lengths))}")
    rows = [
        [
            str(row["length"]),
            str(row["layer"]),
            str(row["heads"]),
            ", ".join(f"{name} {count}" for name, count in row["changed"].items()),
            *("-" if each is None else f"{each:.3f}" for each in row["densities"]),
        ]
        for row in found["layers"]
    ]
    _print_table("layers", ("length", "layer", "heads that differ", "in", "density a", "density b"), rows)
    return OK


def export(args: argparse.Namespace) -> int:
    """Everything in a profile as JSON."""
    from s2o_runtime.profile import load_profile, write_atomically

    document = exported(load_profile(args.profile))
    if args.out is None:
        return _print_json(document)
    write_atomically(args.out, (json.dumps(document, indent=1) + "\n").encode())
    return _print_json({"out": str(args.out)}) if args.json else _said(f"wrote {args.out}")


def exported(profile: Profile) -> dict[str, Any]:
    """A profile as JSON: the fields of the file's document, and `buckets` with every layer in place of the tensors."""
    from s2o_runtime.profile import described

    buckets = [
        {"length": length, "layers": [asdict(layer) for layer in bucket]}
        for length, bucket in zip(profile.lengths, profile.layers, strict=True)
    ]
    document = described(profile)
    record = document.pop("record")
    return document | {"buckets": buckets, "record": record}


def verify(args: argparse.Namespace) -> int:
    """Prove a profile on held-out prompts on this machine."""
    from calibrate.cli import named_device
    from calibrate.reprove import verified

    name, _ = named_device(args.device)
    found = verified(args.model, args.profile, name, args.prompts)
    if args.json:
        _print_json(asdict(found))
    else:
        rows = [
            [
                str(length["length"]),
                f"{max(layer['error'] for layer in length['layers']):.2e}",
                f"{max(layer['error'] / layer['limit'] if layer['limit'] else 0.0 for layer in length['layers']):.0%}",
                f"{fmean(layer['density'] for layer in length['layers']):.3f}",
                "-" if length["needles"] is None else "{} of {}".format(*length["needles"]),
                f"{length['kl']:.1e}",
            ]
            for length in found.lengths
        ]
        _print_table("proven here", ("length", "largest error", "error / limit", "density", "needles", "KL"), rows)
        if not found.same_prompts:
            _print("the prompts are not those the profile was proven on")
    if found.problems:
        return _fail(NOT_PROVEN, f"the proof failed ({'; '.join(found.problems)})")
    return OK


def plot(args: argparse.Namespace) -> int:
    """A heat map of every head's threshold at every length."""
    from calibrate.tau_plot import drawn
    from s2o_runtime.profile import load_profile, write_atomically

    profile = load_profile(args.profile)
    out = args.out or args.profile.with_suffix(".tau.png")
    write_atomically(out, drawn(profile))
    return _print_json({"out": str(out)}) if args.json else _said(f"wrote {out}")


def push(args: argparse.Namespace) -> int:
    """Copy a profile, its card and the report beside it to a folder or a Hub repository, or put it on a shelf."""
    from calibrate.share import HUB, push
    from calibrate.shelf import shelve

    if args.shelf and args.to.startswith(HUB):
        raise ConfigError(f"{args.to} is no folder: a shelf is one")
    return _say_written(args, shelve(args.profile, Path(args.to)) if args.shelf else push(args.profile, args.to))


def pull(args: argparse.Namespace) -> int:
    """Fetch a profile, its card and the report beside it."""
    from calibrate.share import pull

    return _say_written(args, pull(args.source, args.out))


def _say_written(args: argparse.Namespace, files: list[str]) -> int:
    return _print_json({"files": files}) if args.json else _said(*(f"wrote {file}" for file in files))


def _said(*lines: str) -> int:
    for line in lines:
        _print(line)
    return OK


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 36 else f"{text[:34]}.."


def _print_json(value: Any) -> int:
    print(json.dumps(value, indent=1))
    return OK


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH)


def _print(line: str) -> None:
    """One line as it is; a foreign text's control characters are left out."""
    from rich.control import strip_control_codes

    plain = "".join(each if each.isprintable() else " " for each in strip_control_codes(line))
    _console().print(plain, highlight=False, markup=False, soft_wrap=True)


def _print_table(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(Text("".join(each if each.isprintable() else " " for each in cell)) for cell in row))
    _console().print(table)


COMMANDS = {
    "show": show,
    "diff": diff,
    "export": export,
    "verify": verify,
    "plot": plot,
    "push": push,
    "pull": pull,
}

if __name__ == "__main__":
    sys.exit(main())
