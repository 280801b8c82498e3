"""s2o-profile: look into profiles, change, compare and prove them again, draw them and pass them on."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from calibrate.commands.common import Flags, add_output_flags, print_json, run
from calibrate.machine import check_writable, named_device, writing
from calibrate.recipe import DEFAULT_CEILING, KINDS, OPTIONS, Budget, slug
from s2o_runtime.command_line import (
    BAD_INPUT,
    INTERRUPTED,
    NO_RESOURCE,
    NOT_PROVEN,
    OK,
    Parser,
    add_information,
    exit_codes,
    failed,
)
from s2o_runtime.errors import ConfigError, InputError

if TYPE_CHECKING:
    from calibrate.tables import Table

PROGRAM = "s2o-profile"
log = logging.getLogger(PROGRAM)
EXAMPLES = (
    ("see what a profile does and what was proven of it", "show p.safetensors"),
    ("see why head 7 of layer 3 does what it does", "show p.safetensors --head 3.7"),
    ("spend another budget, without model or GPU", "rebudget p.safetensors --budget-rel-mse 1e-2"),
    ("use a profile on another GPU", "retile p.safetensors"),
    ("prove a profile on this machine", "verify p.safetensors --model my/model"),
    ("check its certificate on other prompts", "verify p.safetensors --model my/model --seed 1"),
    ("draw every head's threshold", "plot p.safetensors"),
    ("pass a profile on", "push p.safetensors hf://org/name"),
)
# the options of s2o-calibrate that a command takes, and their defaults in it
REBUDGET = {
    "budget_mse": "",
    "ceiling_rel_mse": f"{DEFAULT_CEILING:g}",
    "budget_rel_mse": "",
    "worst_rows": "the profile's",
    "journal": "beside the profile",
    "out": "<budget>.safetensors here",
}
RETILE = {"device": "a GPU if there is one", "out": "<profile>-<gpu>.safetensors here"}
VERIFY = {
    "model": "",
    "device": "a GPU if there is one",
    "prompts": "those of the profile's recipe",
    "chunk": "that of the profile's recipe",
    "tokenizer": "the model's, whatever the profile's recipe says",
    "trust_remote_code": "it does not run, whatever the profile's recipe says",
}


def parser() -> argparse.ArgumentParser:
    """The commands and their flags. What is not given is left out of the namespace."""
    out = Parser(
        prog=PROGRAM,
        description="Look into S2O profiles, change, compare and prove them again, draw them and pass them on.",
        epilog=exit_codes(OK, BAD_INPUT, NOT_PROVEN, NO_RESOURCE, INTERRUPTED),
        examples=EXAMPLES,
    )
    add_information(out)
    commands = out.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, text: str, *positionals: str, options: Mapping[str, str] = MappingProxyType({})
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, argument_default=argparse.SUPPRESS)
        for positional in positionals:
            kind = str if positional in ("to", "source") else Path
            added.add_argument(positional, metavar=positional.upper(), type=kind)
        for option, default in options.items():
            replace(OPTIONS[option], default_text=default, required=not default).add_to(added)
        add_output_flags(added)
        return added

    show = command("show", "What a profile does and what was proven of it.", "profile")
    show.add_argument("--head", type=_head, metavar="LAYER.HEAD", help="what one head does at every length, and why")
    show.add_argument("--journal", type=Path, metavar="FILE", help="the measurements (default beside the profile)")
    command("rebudget", "Another budget, from what was measured: no model, no GPU.", "profile", options=REBUDGET)
    command("retile", "The same thresholds with tiles for the GPU here.", "profile", options=RETILE)
    command("diff", "What differs between two profiles.", "a", "b")
    export = command("export", "Everything in a profile as JSON.", "profile")
    export.add_argument("--out", type=Path, metavar="FILE.json", help="default standard output")
    verify = command(
        "verify", "Prove a profile here, on its own prompts or with --seed on others.", "profile", options=VERIFY
    )
    replace(
        OPTIONS["seed"],
        help="check the certificate on other prompts, drawn with this seed",
        default_text="prove again on the prompts that layers were adjusted on",
        required=False,
    ).add_to(verify)
    plot = command("plot", "A picture of every head's threshold.", "profile")
    plot.add_argument("--out", type=Path, metavar="FILE.png", help="default <profile>.tau.png here")
    command("push", "Copy a profile, its card and its report to a folder or hf://org/name.", "profile", "to")
    pull = command("pull", "Fetch a profile and its report from a folder, a file or hf://org/name.", "source")
    pull.add_argument("--out-dir", type=Path, metavar="FOLDER", help="default here")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run(PROGRAM, vars(parser().parse_args(argv)), _run)


def _run(flags: Flags) -> int:
    try:
        return int(COMMANDS[flags["command"]](flags))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise InputError(
            f"{error.filename or 'a file'} cannot be written or read ({error.strerror}): check the path"
        ) from error


def _head(text: str) -> tuple[int, int]:
    layer, dot, head = text.partition(".")
    if not (dot and layer.isascii() and head.isascii() and layer.isdigit() and head.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a layer and a head: try 3.7")
    return int(layer), int(head)


def show(flags: Flags) -> int:
    """The summary of a profile, or one head of it."""
    from calibrate.report.explain import explain_head, head_lines
    from calibrate.report.shown import summary_parts
    from calibrate.report.summary import summary
    from s2o_runtime.profile import load_profile

    profile = load_profile(flags["profile"])
    if "head" not in flags:
        return _say(flags, summary(profile), summary_parts(profile))
    layer, head = flags["head"]
    geometry = profile.geometry
    table_row = geometry.row_of(layer)
    if table_row is None or head >= geometry.query_heads:
        layers = ", ".join(map(str, geometry.layer_numbers)) or f"0 to {geometry.layers - 1}"
        raise ConfigError(
            f"head {layer}.{head} does not exist: layers are {layers}, heads 0 to {geometry.query_heads - 1}"
        )
    rows = explain_head(profile, flags["profile"], table_row, head, flags.get("journal"))
    return _say(flags, {"layer": layer, "head": head, "lengths": rows}, head_lines(rows))


def rebudget(flags: Flags) -> int:
    """Spend another budget on what was measured for a profile; no model is loaded.

    flags: "profile" and some of `REBUDGET`.
    """
    if not {f"budget_{kind}" for kind in KINDS} & flags.keys():
        raise ConfigError("rebudget needs the new budget: give --budget-mse or --budget-rel-mse")
    profile, budget = flags["profile"], Budget.of(flags)
    worst_rows = flags.get("worst_rows")
    guard = "" if worst_rows is None else f"-rows-{worst_rows:g}"
    ceiling = f"-ceiling-{budget.ceiling or 0:g}" if "ceiling_rel_mse" in flags else ""
    out = _out(flags, f"{budget}{ceiling}{guard}.safetensors")

    from calibrate.profiles.rebudget import rebudget

    with writing(out):
        rebudget(profile, budget, out, flags.get("journal"), worst_rows)
    return _written(flags, out)


def retile(flags: Flags) -> int:
    """Tune a profile's tiles for the device here; its thresholds stay. flags: "profile" and some of `RETILE`."""
    profile = flags["profile"]
    name, device = named_device(flags.get("device"))
    out = _out(flags, f"{profile.stem}-{slug(device.name)}.safetensors")

    from calibrate.profiles.retile import retile

    with writing(out):
        retiled = retile(profile, name, out).record.retiled
    if device.kind == "cpu" and retiled is not None:
        log.warning("%s", retiled.note)
    return _written(flags, out)


def diff(flags: Flags) -> int:
    """What differs between two profiles."""
    from calibrate.report.compare import difference_parts, differences
    from s2o_runtime.profile import load_profile

    changes = differences(load_profile(flags["a"]), load_profile(flags["b"]))
    return _say(flags, changes, difference_parts(changes))


def export(flags: Flags) -> int:
    """Everything in a profile as JSON."""
    from calibrate.report.shown import exported
    from s2o_runtime.profile import load_profile

    document = exported(load_profile(flags["profile"]))
    if "out" not in flags:
        return print_json(document)
    return _written(flags, flags["out"], (json.dumps(document, indent=1) + "\n").encode())


def verify(flags: Flags) -> int:
    """Prove a profile on this machine: on its own prompts again, or its certificate on others."""
    if "model" not in flags:
        raise ConfigError("verify needs the profile's model: give --model MODEL")
    name, _ = named_device(flags.get("device"))

    from calibrate.proof.again import opened, recertified, verified
    from calibrate.report.again import certificate_parts, proof_parts

    profile = opened(
        str(flags["model"]),
        flags["profile"],
        name,
        flags.get("prompts"),
        flags.get("chunk"),
        needs_certificate="seed" in flags,
        trust_remote_code=flags.get("trust_remote_code", False),
        tokenizer=flags.get("tokenizer"),
    )
    if "seed" in flags:
        check = recertified(profile, flags["seed"])
        _say(flags, asdict(check), certificate_parts(check))
        problems, failure = check.problems, "the certificate does not hold"
    else:
        proof = verified(profile)
        _say(flags, asdict(proof), proof_parts(proof))
        problems, failure = tuple(proof.problems), "the proof failed"
    return failed(PROGRAM, NOT_PROVEN, f"{failure} ({'; '.join(problems)})") if problems else OK


def plot(flags: Flags) -> int:
    """A heat map of every head's threshold at every length."""
    from calibrate.report.tau_plot import tau_picture
    from s2o_runtime.profile import load_profile

    profile = load_profile(flags["profile"])
    out = _out(flags, f"{flags['profile'].stem}.tau.png")
    return _written(flags, out, tau_picture(profile))


def push(flags: Flags) -> int:
    """Copy a profile, its card and the report beside it to a folder or a Hub repository."""
    from calibrate.report.transfer import push

    files = push(flags["profile"], flags["to"])
    return _say(flags, {"files": files}, [f"wrote {file}" for file in files])


def pull(flags: Flags) -> int:
    """Fetch a profile, its card and the report beside it."""
    from calibrate.report.transfer import pull

    files = pull(flags["source"], flags.get("out_dir", Path()))
    return _say(flags, {"files": files}, [f"wrote {file}" for file in files])


def _out(flags: Flags, name: str) -> Path:
    """The file to write: `--out`, or one of this name in the current folder, which must not be the profile itself."""
    out: Path = flags.get("out", Path(name))
    check_writable("--out", out)
    if "out" not in flags and out.exists() and out.samefile(flags["profile"]):
        raise ConfigError(f"{out} is the profile that is read: give --out")
    return out


def _written(flags: Flags, out: Path, data: bytes | None = None) -> int:
    """Say that a file was written, after writing `data` to it if that is given."""
    from s2o_runtime.files import write_atomically

    if data is not None:
        write_atomically(out, data)
    return _say(flags, {"out": str(out)}, [f"wrote {out}"])


def _say(flags: Flags, value: Any, parts: Iterable[Table | str]) -> int:
    """Print a value as JSON with --json, otherwise the tables and lines that say the same."""
    from calibrate.tables import Table, print_lines, print_table, terminal

    if "json" in flags:
        return print_json(value)
    console = terminal()
    for part in parts:
        if isinstance(part, Table):
            print_table(part, console)
        else:
            print_lines([part], console)
    return OK


COMMANDS = {command.__name__: command for command in (show, rebudget, retile, diff, export, verify, plot, push, pull)}

if __name__ == "__main__":
    sys.exit(main())
