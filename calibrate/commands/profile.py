"""s2o-profile: look into profiles, change them, prove them again, draw and describe them."""

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

from calibrate.commands.common import Flags, add_output_flags, print_json, run_command
from calibrate.machine import check_output, format_json_file, resolve_device
from calibrate.options import read_path
from calibrate.recipe import DEFAULT_CEILING, OPTIONS, Budget, Recipe, make_slug
from s2o_runtime.command_line import NOT_PROVEN, OK, Parser, add_information, describe_exit_codes, report_failure
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.files import write_atomically
from s2o_runtime.logs import emit_line
from s2o_runtime.profile.record import BUDGET_KINDS

if TYPE_CHECKING:
    from calibrate.model.preflight import Preflight
    from calibrate.tables import Table

PROGRAM = "s2o-profile"
log = logging.getLogger(PROGRAM)
EXAMPLES = (
    ("see what a profile does and what was proven of it", "show p.safetensors"),
    ("see why head 7 of layer 3 does what it does", "show p.safetensors --head 3.7"),
    ("spend another budget, without model or GPU", "rebudget p.safetensors --budget-rel-mse 1e-2"),
    ("use a profile on another GPU", "retile p.safetensors"),
    ("prove a profile on this machine", "verify p.safetensors --model my/model"),
    ("check its certificate on 64 other prompts", "verify p.safetensors --model my/model --seed 1 --num-certify 64"),
    ("draw every head's threshold", "plot p.safetensors"),
    ("describe a profile to others, in Markdown and HTML", "card p.safetensors"),
    ("make a folder to publish", "publish p.safetensors --name my/model --evaluation summary.json --out-dir out"),
)
# the options of s2o-calibrate that a command takes, and their defaults in it
REBUDGET = {
    "budget_mse": "", "ceiling_rel_mse": f"{DEFAULT_CEILING:g}", "budget_rel_mse": "",
    "worst_rows": "the profile's", "journal": "beside the profile", "out": "<budget>.safetensors here",
}  # fmt: skip
RETILE = {"device": "a GPU if there is one", "out": "<profile>-<gpu>.safetensors here"}
VERIFY = {
    "model": "",
    "device": "a GPU if there is one",
    "prompts": "those of the profile's recipe",
    "chunk": "that of the profile's recipe",
    "tokenizer": "the model's, whatever the profile's recipe says",
    "trust_remote_code": "it does not run, whatever the profile's recipe says",
}
FRESH = {  # what an option is in verify, and its default there
    "seed": ("check the certificate on other prompts, drawn with this seed",
             "prove again on the prompts that layers were adjusted on"),
    "num_certify": ("with --seed, how many prompts of each length", "as many as the profile's recipe certified on"),
}  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the commands. Flags that are not given are left out of the namespace."""
    out = Parser(
        prog=PROGRAM,
        description="Look into S2O profiles, change them, prove them again, draw and describe them.",
        epilog=describe_exit_codes(),
        examples=EXAMPLES,
    )
    add_information(out)
    commands = out.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add_command(name: str, text: str, options: Mapping[str, str] = MappingProxyType({})) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, argument_default=argparse.SUPPRESS)
        command.add_argument("profile", metavar="PROFILE", type=_find_profile)
        for option, default in options.items():
            replace(OPTIONS[option], default_text=default, required=not default).add_to(command)
        add_output_flags(command)
        return command

    show = add_command("show", "What a profile does and what was proven of it.")
    show.add_argument(
        "--head", type=_parse_head, metavar="LAYER.HEAD", help="what one head does at every length, and why"
    )
    show.add_argument("--journal", type=read_path, metavar="FILE", help="the measurements (default beside the profile)")
    rebudget = add_command("rebudget", "Another budget, from what was measured: no model, no GPU.", REBUDGET)
    refused = "refused: no curve tells answers, so it prints the s2o-calibrate command that continues from the journal"
    replace(OPTIONS["budget_kl"], help=refused, default_text="", required=True).add_to(rebudget)
    add_command("retile", "The same thresholds with tiles for the GPU here.", RETILE)
    export = add_command("export", "Everything in a profile as JSON.")
    export.add_argument("--out", type=read_path, metavar="FILE.json", help="default standard output")
    verify = add_command("verify", "Prove a profile here, on its own prompts or with --seed on others.", VERIFY)
    for option, (text, default) in FRESH.items():
        replace(OPTIONS[option], help=text, default_text=default).add_to(verify)
    plot = add_command("plot", "A picture of every head's threshold.")
    plot.add_argument("--out", type=read_path, metavar="FILE.png", help="default <profile>.tau.png here")
    card = add_command("card", "A page about a profile, in Markdown and in HTML.")
    card.add_argument("--out-dir", type=read_path, metavar="FOLDER", help="default here")
    publish = add_command("publish", "A folder to publish: profile, card and README, in the layout of a model's s2o/.")
    publish.add_argument("--out-dir", type=read_path, metavar="FOLDER", required=True, help="it may hold others")
    publish.add_argument("--name", metavar="ORG/MODEL", help="the model's hub id (default as it was calibrated)")
    for command in (card, publish):
        command.add_argument(
            "--evaluation", type=read_path, metavar="FILE", help="summary.json of s2o-eval, for RULER's line"
        )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_command(PROGRAM, vars(build_parser().parse_args(argv)), _run)


def _run(flags: Flags) -> int:
    for name in OPTIONS.keys() & flags.keys():
        OPTIONS[name].check(flags[name])
    try:
        return int(COMMANDS[flags["command"]](flags))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise InputError(
            f"{error.filename or 'a file'} cannot be written or read ({error.strerror}): check the path"
        ) from error


def _find_profile(text: str) -> Path:
    """Return a profile's file; a model's name stands for the profile of it that ships, if there is one."""
    path = read_path(text)
    if path.suffix == ".safetensors" or path.exists() or path.parent != Path():
        return path
    from s2o_runtime.profile.find import list_folders

    profiles = [file for folder in list_folders() for file in sorted((folder / make_slug(text)).rglob("*.safetensors"))]
    if len(profiles) > 1:
        names = ", ".join(map(str, profiles))
        raise argparse.ArgumentTypeError(f"{text} has {len(profiles)} profiles: name one of {names}")
    return profiles[0] if profiles else path


def _parse_head(text: str) -> tuple[int, int]:
    layer, dot, head = text.partition(".")
    if not (dot and layer.isascii() and head.isascii() and layer.isdigit() and head.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a layer and a head: try 3.7")
    return int(layer), int(head)


def show(flags: Flags) -> int:
    """Print the summary of a profile, or of one head of it."""
    from calibrate.report.contents import summarise_profile
    from calibrate.report.explain import explain_head, format_head
    from calibrate.report.sections import show_summary
    from s2o_runtime.profile import load_profile

    profile = load_profile(flags["profile"])
    if "head" not in flags:
        return _print_result(flags, summarise_profile(profile), show_summary(profile))
    layer, head = flags["head"]
    geometry = profile.geometry
    table_row = geometry.find_row(layer)
    if table_row is None or head >= geometry.query_heads:
        layers = ", ".join(map(str, geometry.layer_numbers)) or f"0 to {geometry.layers - 1}"
        raise ConfigError(
            f"head {layer}.{head} does not exist: layers are {layers}, heads 0 to {geometry.query_heads - 1}"
        )
    rows = explain_head(profile, flags["profile"], table_row, head, flags.get("journal"))
    return _print_result(flags, {"layer": layer, "head": head, "lengths": rows}, format_head(rows))


def rebudget(flags: Flags) -> int:
    """Allocate another budget from a profile's measurements, without its model."""
    if not {f"budget_{kind}" for kind in BUDGET_KINDS} & flags.keys():
        raise ConfigError("rebudget needs the new budget: give --budget-mse or --budget-rel-mse")
    budget, worst_rows = Budget.from_options(flags), flags.get("worst_rows")
    guard = "" if worst_rows is None else f"-rows-{worst_rows:g}"
    ceiling = f"-ceiling-{budget.ceiling or 0:g}" if "ceiling_rel_mse" in flags else ""
    out = _choose_output(flags, f"{budget}{ceiling}{guard}.safetensors", is_profile=True)

    from calibrate.profiles.rebudget import rebudget

    rebudget(flags["profile"], budget, out, flags.get("journal"), worst_rows)
    return _write_output(flags, out)


def retile(flags: Flags) -> int:
    """Tune a profile's tiles for the device here; its thresholds stay."""
    profile = flags["profile"]
    name, device = resolve_device(flags.get("device"))
    out = _choose_output(flags, f"{profile.stem}-{make_slug(device.name)}.safetensors", is_profile=True)

    from calibrate.profiles.retile import retile

    retiled = retile(profile, name, out)
    if device.kind == "cpu":
        log.warning("%s", retiled.record["retiled"]["note"])
    return _write_output(flags, out)


def export(flags: Flags) -> int:
    """Print or write everything in a profile as JSON."""
    out = _choose_output(flags, "") if "out" in flags else None

    from calibrate.report.sections import export_profile
    from s2o_runtime.profile import load_profile

    document = export_profile(load_profile(flags["profile"]))
    return print_json(document) if out is None else _write_output(flags, out, format_json_file(document))


def verify(flags: Flags) -> int:
    """Prove a profile on this machine: on its own prompts again, or its certificate on others."""
    if "model" not in flags:
        raise ConfigError("verify needs the profile's model: give --model MODEL")
    if "num_certify" in flags and "seed" not in flags:
        raise ConfigError("num_certify is of fresh prompts, which no seed draws: give --seed too, or leave it out")
    name, device = resolve_device(flags.get("device"))

    from calibrate.api import warn_without_gpu
    from calibrate.model.estimate import estimate
    from calibrate.progress import PhaseClock
    from calibrate.prompts.documents import read_documents
    from calibrate.proof.recheck import open_profile, verify_certificate, verify_proof
    from calibrate.report.sections import list_verify_plan, show_certificate, show_proof
    from calibrate.tables import open_console, print_fields

    seed, progress = flags.get("seed"), "quiet" not in flags
    read_documents(flags.get("prompts", ()))  # bad files end the command before it loads the model
    phases, seconds = ("loading the model", "proving" if seed is None else "certifying"), dict[str, float]()

    def announce(recipe: Recipe, preflight: Preflight) -> None:
        expected = estimate(recipe, preflight.sizes, preflight.geometry, device).verifying
        seconds.update({phase: expected[phase] for phase in phases})
        warn_without_gpu(recipe.model, preflight, sum(seconds.values()), device)
        if progress:
            print_fields(list_verify_plan(recipe, preflight, seconds), open_console(stderr="json" in flags))
            emit_line(PROGRAM, f"{phases[0]} ..")

    options = {option: flags[option] for option in (*VERIFY, *FRESH) if option in flags}
    profile = open_profile(flags["profile"], options | {"device": name}, announce)
    with PhaseClock(seconds).time_phase(phases[1], progress):
        if seed is None:
            proof = verify_proof(profile, progress=progress)
            value, parts, problems = asdict(proof), show_proof(proof), proof.problems
        else:
            check = verify_certificate(profile, progress=progress)
            value, parts, problems = asdict(check), show_certificate(check), check.problems
    measured = {"model": flags["model"], "profile": str(flags["profile"]), "device": device.name, "seed": seed}
    _print_result(flags, measured | value, parts)
    failure = "the proof failed" if seed is None else "the certificate does not hold"
    return report_failure(PROGRAM, NOT_PROVEN, f"{failure} ({'; '.join(problems)})") if problems else OK


def plot(flags: Flags) -> int:
    """Draw a heat map of every head's threshold at every length."""
    out = _choose_output(flags, f"{flags['profile'].stem}.tau.png")
    if out.suffix.lower() != ".png":
        raise ConfigError(f"--out {out} is not named as a picture: give a name that ends in .png")

    from calibrate.report.figures import draw_tau_png
    from s2o_runtime.profile import load_profile

    return _write_output(flags, out, draw_tau_png(load_profile(flags["profile"])))


def card(flags: Flags) -> int:
    """Write a profile's card in Markdown, and in HTML with every layer's settings."""
    profile, folder = flags["profile"], flags.get("out_dir", Path())
    paths = [folder / f"{profile.stem}{suffix}" for suffix in (".md", ".html")]
    for path in paths:
        check_output("--out-dir", path, [profile])

    from calibrate.report.page import render_card, render_html_card
    from s2o_runtime.profile import load_profile

    loaded = load_profile(profile)
    lines = _read_ruler(flags)
    page, failure = render_html_card(loaded, profile.name, lines)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, (render_card(loaded, profile.name, tasks=lines), page), strict=True):
        write_atomically(path, text.encode())
    if failure:
        log.warning("%s", failure)
    return _report_files(flags, paths)


def publish(flags: Flags) -> int:
    """Write a folder to publish: a profile under its model's hub id, its card and a README."""
    from calibrate.report.publish import publish

    return _report_files(flags, publish(flags["profile"], flags.get("name"), flags["out_dir"], _read_ruler(flags)))


def _report_files(flags: Flags, paths: Sequence[Path]) -> int:
    return _print_result(flags, {"files": list(map(str, paths))}, [f"wrote {path}" for path in paths])


def _read_ruler(flags: Flags) -> list[str]:
    """Return what --evaluation, if it is given, says of a profile on RULER. Raises InputError if it says nothing."""
    from calibrate.evaluation.report import list_ruler

    if "evaluation" not in flags:
        return []
    path, profile = flags["evaluation"], flags["profile"]
    try:
        lines = list_ruler(json.loads(path.read_text(encoding="utf-8")), profile)
    except (ValueError, TypeError, KeyError):  # not JSON, or another's
        lines = []
    if not lines:
        raise InputError(
            f"{path} has nothing on {profile} and RULER, expected the summary.json of s2o-eval --profile {profile} "
            "--tasks ruler: give that"
        )
    return lines


def _choose_output(flags: Flags, name: str, *, is_profile: bool = False) -> Path:
    """Return `--out`, or a file of this name in the current folder; it never replaces the profile itself."""
    out: Path = flags.get("out", Path(name))
    check_output("--out", out, [flags["profile"]], is_profile=is_profile)
    return out


def _write_output(flags: Flags, out: Path, data: bytes | None = None) -> int:
    """Report that a file was written, after writing `data` to it if that is given."""
    if data is not None:
        write_atomically(out, data)
    return _print_result(flags, {"out": str(out)}, [f"wrote {out}"])


def _print_result(flags: Flags, value: Any, parts: Iterable[Table | str]) -> int:
    """Print a value as JSON with --json, otherwise the tables and lines with the same content."""
    from calibrate.tables import Table, open_console, print_lines, print_table

    if "json" in flags:
        return print_json(value)
    console = open_console()
    for part in parts:
        if isinstance(part, Table):
            print_table(part, console)
        else:
            print_lines([part], console)
    return OK


COMMANDS = {command.__name__: command for command in (show, rebudget, retile, export, verify, plot, card, publish)}

if __name__ == "__main__":
    sys.exit(main())
