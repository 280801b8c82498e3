"""s2o-profile: look into profiles, change, compare and prove them again, draw them and pass them on."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
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
    from calibrate.proof.again import Opened
    from s2o_runtime.profile import Profile

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
    ("file a profile by model and device", "push p.safetensors profiles --catalogue --name org/model"),
)
# the options of s2o-calibrate that a command takes, and their defaults in it
REBUDGET = {
    "budget_mse": "",
    "ceiling_rel_mse": f"{DEFAULT_CEILING:g}",
    "budget_rel_mse": "",
    "budget_kl": "",
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
    push = command("push", "Copy a profile, its card and its report to a folder or hf://org/name.", "profile", "to")
    push.add_argument("--catalogue", action="store_true", help="file it by model and device in a folder with an index")
    push.add_argument("--name", help="with --catalogue: what the model is called there (default as it was calibrated)")
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
    from calibrate.profiles.card import COLUMNS, length_cells
    from calibrate.profiles.certified import adjusted_on, statement
    from calibrate.profiles.summary import summary
    from s2o_runtime.profile import load_profile

    profile = load_profile(flags["profile"])
    if "head" in flags:
        return _show_head(flags, profile)
    contents = summary(profile)
    if "json" in flags:
        return print_json(contents)
    for name in ("model", "architecture", "device", "budget", "objective", "proof"):
        _print(f"{name:<12}  {contents[name] or 'not recorded'}")
    if (contents["proof"] or "").startswith("held out"):
        _print(statement(profile.record.certificate, adjusted_on(profile.record)))
    for sentence in (*contents["problems"], *(profile.record.not_proven or ())):
        _print(f"not proven: {sentence}")
    if contents["retiled"]:
        _print(f"{contents['retiled']}")
    _print_table("", COLUMNS, [length_cells(row) for row in contents["lengths"]])
    _print(f"prompts below {profile.min_length} tokens stay dense")
    return OK


def _show_head(flags: Flags, profile: Profile) -> int:
    from calibrate.profiles.explain import explain_head

    layer, head = flags["head"]
    geometry = profile.geometry
    table_row = geometry.row_of(layer)
    if table_row is None or head >= geometry.query_heads:
        layers = ", ".join(map(str, geometry.layer_numbers)) or f"0 to {geometry.layers - 1}"
        raise ConfigError(
            f"head {layer}.{head} does not exist: layers are {layers}, heads 0 to {geometry.query_heads - 1}"
        )
    rows = explain_head(profile, flags["profile"], table_row, head, flags.get("journal"))
    if "json" in flags:
        return print_json({"layer": layer, "head": head, "lengths": rows})
    for row in rows:
        _print(f"{row['length']} tokens: {_settings(row)}")
        if row["density"] is not None:
            _print(f"  predicted density {row['density']:.3f}, error {row['error']:.2e} {row['unit']}")
        _print(f"  {row['why']}")
    return OK


def _settings(row: Mapping[str, Any]) -> str:
    if row["mode"] == "dense":
        return "dense"
    if row["linear"]:
        return f"linear tail, segment {row['segment']}, grain {row['grain']}, tile {row['tile']}"
    tail = ", tail" if row["tail"] else ""
    return (
        f"tau {row['tau']:.3g} ({row['stop_rule']}), segment {row['segment']}, repr. {row['representatives']}{tail}, "
        f"grain {row['grain']}, tile {row['tile']}{', int8 scores' if row['scores'] == 'int8' else ''}"
    )


def rebudget(flags: Flags) -> int:
    """Spend another budget on what was measured for a profile; no model is loaded.

    flags: "profile" and some of `REBUDGET`.
    """
    if not {f"budget_{kind}" for kind in KINDS} & flags.keys():
        raise ConfigError("rebudget needs the new budget: give --budget-mse, --budget-rel-mse or --budget-kl")
    profile, budget = flags["profile"], Budget.of(flags)
    worst_rows = flags.get("worst_rows")
    guard = "" if worst_rows is None else f"-rows-{worst_rows:g}"
    ceiling = f"-ceiling-{budget.ceiling or 0:g}" if "ceiling_rel_mse" in flags else ""
    out = _out(flags, f"{budget}{ceiling}{guard}.safetensors")

    from calibrate.profiles.rebudget import rebudget

    with writing(out):
        rebudget(profile, budget, out, flags.get("journal"), worst_rows)
    return _report_written(flags, out)


def retile(flags: Flags) -> int:
    """Tune a profile's tiles for the device here; its thresholds stay. flags: "profile" and some of `RETILE`."""
    profile = flags["profile"]
    name, device = named_device(flags.get("device"))
    out = _out(flags, f"{profile.stem}-{slug(device.name)}.safetensors")

    from calibrate.profiles.retile import retile

    with writing(out):
        retiled = retile(profile, name, out)
    if device.kind == "cpu":
        log.warning("%s", retiled.note)
    return _report_written(flags, out)


def diff(flags: Flags) -> int:
    """What differs between two profiles."""
    from calibrate.profiles.compare import differences
    from s2o_runtime.profile import load_profile

    changes = differences(load_profile(flags["a"]), load_profile(flags["b"]))
    if "json" in flags:
        return print_json(changes)
    if not any(changes.values()):
        _print("the profiles are the same")
        return OK
    fields = [[name, _short(a), _short(b)] for name, (a, b) in changes["fields"].items()]
    _print_table("fields", ("field", "a", "b"), fields)
    for name, lengths in changes["lengths"].items():
        if lengths:
            _print(f"lengths in {name.removeprefix('only_')} only: {', '.join(map(str, lengths))}")
    rows = [
        [
            str(row["length"]),
            str(row["layer"]),
            str(row["heads"]),
            ", ".join(f"{name} {count}" for name, count in row["changed"].items()),
            *("-" if density is None else f"{density:.3f}" for density in row["densities"]),
        ]
        for row in changes["layers"]
    ]
    names = ("length", "layer", "heads that differ", "in", "density a", "density b")
    _print_table("layers", names, rows, wrap="in")
    return OK


def export(flags: Flags) -> int:
    """Everything in a profile as JSON."""
    from s2o_runtime.files import write_atomically
    from s2o_runtime.profile import load_profile

    document = exported(load_profile(flags["profile"]))
    if "out" not in flags:
        return print_json(document)
    write_atomically(flags["out"], (json.dumps(document, indent=1) + "\n").encode())
    return _report_written(flags, flags["out"])


def exported(profile: Profile) -> dict[str, Any]:
    """A profile as JSON: the fields of the file's document, and `buckets` with every layer in place of the tensors."""
    from s2o_runtime.config import plain
    from s2o_runtime.profile import described

    buckets = [
        {"length": length, "layers": [plain(layer) for layer in bucket]}
        for length, bucket in zip(profile.lengths, profile.layers, strict=True)
    ]
    document = described(profile)
    record = document.pop("record")
    return document | {"buckets": buckets, "record": record}


def verify(flags: Flags) -> int:
    """Prove a profile on this machine: on its own prompts again, or its certificate on others."""
    if "model" not in flags:
        raise ConfigError("verify needs the profile's model: give --model MODEL")
    name, _ = named_device(flags.get("device"))

    from calibrate.proof.again import opened

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
    return _check_certificate(flags, profile) if "seed" in flags else _prove(flags, profile)


def _prove(flags: Flags, profile: Opened) -> int:
    from calibrate.proof.again import verified

    proof = verified(profile)
    if "json" in flags:
        print_json(asdict(proof))
    else:
        rows = [
            [
                str(length["length"]),
                f"{max(layer['error'] for layer in length['layers']):.2e}",
                f"{max(layer['rel_mse'] for layer in length['layers']):.2e}",
                f"{max(layer['error'] / layer['limit'] if layer['limit'] else 0.0 for layer in length['layers']):.0%}",
                f"{fmean(layer['density'] for layer in length['layers']):.3f}",
                "-" if length["needles"] is None else "{} of {}".format(*length["needles"]),
                f"{length['kl']:.1e}",
            ]
            for length in proof.lengths
        ]
        names = ("length", "largest error", "rel_mse", "error / limit", "density", "needles", "KL")
        _print_table("proven here", names, rows)
        if not proof.same_prompts:
            _print("the prompts are not those the profile was proven on")
    if proof.problems:
        return failed(PROGRAM, NOT_PROVEN, f"the proof failed ({'; '.join(proof.problems)})")
    return OK


def _check_certificate(flags: Flags, profile: Opened) -> int:
    from calibrate.proof.again import recertified

    check = recertified(profile, flags["seed"])
    if "json" in flags:
        print_json(asdict(check))
    else:
        rows = [
            [
                str(length.length),
                str(length.prompts),
                f"{sum(one.mean > one.bound for one in length.bounds)} of {len(length.bounds)}",
                f"{sum(one.broken for one in length.bounds)}",
                f"{length.mean_kl:.1e}",
                f"{length.kl_above} of {length.prompts}",
                "-" if length.retrieval is None else f"{length.retrieval.kept} of {length.retrieval.found}",
            ]
            for length in check.lengths
        ]
        names = ("length", "prompts", "means above", "broken", "mean KL", "KL above", "kept")
        _print_table("the certificate on fresh prompts", names, rows)
        _print("broken: a mean that is above its bound by more than chance explains, at 5% for all bounds together")
    if check.problems:
        return failed(PROGRAM, NOT_PROVEN, f"the certificate does not hold ({'; '.join(check.problems)})")
    return OK


def plot(flags: Flags) -> int:
    """A heat map of every head's threshold at every length."""
    from calibrate.report.tau_plot import tau_picture
    from s2o_runtime.files import write_atomically
    from s2o_runtime.profile import load_profile

    profile = load_profile(flags["profile"])
    out = _out(flags, f"{flags['profile'].stem}.tau.png")
    write_atomically(out, tau_picture(profile))
    return _report_written(flags, out)


def push(flags: Flags) -> int:
    """Copy a profile, its card and the report beside it to a folder or a Hub repository, or add it to a catalogue."""
    from calibrate.profiles.catalogue import add_to_catalogue
    from calibrate.profiles.share import HUB, push

    profile, to = flags["profile"], flags["to"]
    if "catalogue" in flags and to.startswith(HUB):
        raise ConfigError(f"{to} is not a folder: a catalogue is one, so leave --catalogue out")
    if "name" in flags and "catalogue" not in flags:
        raise ConfigError("--name renames the model of a profile in a catalogue: give --catalogue too")
    filed = "catalogue" in flags
    files = add_to_catalogue(profile, Path(to), flags.get("name")) if filed else push(profile, to)
    return _report_files(flags, files)


def pull(flags: Flags) -> int:
    """Fetch a profile, its card and the report beside it."""
    from calibrate.profiles.share import pull

    return _report_files(flags, pull(flags["source"], flags.get("out_dir", Path())))


def _out(flags: Flags, name: str) -> Path:
    """The file to write: `--out`, or one of this name in the current folder, which must not be the profile itself."""
    out: Path = flags.get("out", Path(name))
    check_writable("--out", out)
    if "out" not in flags and out.exists() and out.samefile(flags["profile"]):
        raise ConfigError(f"{out} is the profile that is read: give --out")
    return out


def _report_written(flags: Flags, out: Path) -> int:
    if "json" in flags:
        return print_json({"out": str(out)})
    _print(f"wrote {out}")
    return OK


def _report_files(flags: Flags, files: Sequence[str]) -> int:
    if "json" in flags:
        return print_json({"files": files})
    for file in files:
        _print(f"wrote {file}")
    return OK


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 36 else f"{text[:34]}.."


def _print(line: str) -> None:
    from calibrate.tables import print_lines, terminal

    print_lines([line], terminal())


def _print_table(title: str, names: Sequence[str], rows: Sequence[Sequence[str]], wrap: str | None = None) -> None:
    from calibrate.tables import Table, print_table, terminal

    print_table(Table(names, rows, title, wrap=wrap), terminal())


COMMANDS = {
    "show": show,
    "rebudget": rebudget,
    "retile": retile,
    "diff": diff,
    "export": export,
    "verify": verify,
    "plot": plot,
    "push": push,
    "pull": pull,
}

if __name__ == "__main__":
    sys.exit(main())
