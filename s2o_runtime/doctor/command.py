"""s2o-doctor: flags to findings, and an exit code for scripts. Torch is imported after the flags are read."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from s2o_runtime.command_line import (
    BAD_INPUT,
    INTERRUPTED,
    NO_RESOURCE,
    OK,
    Parser,
    add_information,
    exit_codes,
    failure_code,
)
from s2o_runtime.command_line import exit_code as run_command
from s2o_runtime.doctor import findings
from s2o_runtime.doctor.findings import Finding, Section, environment, variables
from s2o_runtime.errors import S2OError
from s2o_runtime.logs import set_up

if TYPE_CHECKING:
    from s2o_runtime.doctor.profile_check import ModelView

PROGRAM = "s2o-doctor"
EXAMPLES = (
    ("see what is installed here and whether the kernels compute what they should", ""),
    ("see what a profile would run on this machine", "--profile profiles/demo/cpu/mse-0.0001.safetensors"),
    ("check that a profile is of a model, in a script", "--profile p.safetensors --model my/model --json"),
)


def parser(program: str = PROGRAM) -> Parser:
    """The flags."""
    out = Parser(
        program,
        description="Say what is installed here, test the kernels against the reference in seconds, and with a profile "
        "or a model which layers would run S2O, which dense, and why.",
        epilog=exit_codes(OK, BAD_INPUT, NO_RESOURCE, INTERRUPTED),
        examples=EXAMPLES,
    )
    out.add_argument("--profile", type=Path, metavar="FILE", help="what this profile would run here")
    out.add_argument("--model", metavar="NAME", help="as of s2o-calibrate: its layers, and if it is the profile's")
    out.add_argument("--device", metavar="NAME", help="cuda, cuda:1 or cpu (default a GPU if there is one)")
    out.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_information(out)
    return out


def main(
    arguments: Sequence[str] | None = None,
    program: str = PROGRAM,
    view_of: Callable[[str, Path | None], ModelView] | None = None,
) -> int:
    """Run the command.

    Args:
        arguments: of the command line.
        program: its name.
        view_of: finds a model by its name, and may say more of it at the profile's lengths; by default transformers'
            configuration of a folder or hub id.

    Returns:
        The exit code: 0 if all is well, 2 for a flag, a profile or a model that is wrong or do not fit one another,
        4 where torch or the GPU cannot be used or the self-test fails.
    """
    args = parser(program).parse_args(arguments)

    def run() -> int:
        set_up(logging.ERROR, as_json=False)  # what the runtime would warn about is among the findings
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
        sections = examine(args.profile, args.model, args.device, view_of)
        print(json.dumps(findings.as_json(sections), indent=1) if args.json else findings.as_text(sections))
        return findings.exit_code(sections)

    return run_command(program, run)


def examine(
    profile: Path | None = None,
    model: str | None = None,
    device: str | None = None,
    view_of: Callable[[str, Path | None], ModelView] | None = None,
) -> list[Section]:
    """All that s2o-doctor finds, in the order in which it is printed.

    Args:
        profile: a profile's file.
        model: a model's name.
        device: a torch device; by default a GPU if there is one.
        view_of: as for `main`.
    """
    installed = environment(wants_gpu=device != "cpu")
    if any(one.name == "torch" and one.code for one in installed):
        return [Section("environment", installed)]  # nothing else can be looked at
    sections = [Section("environment", [*installed, *variables()])]

    from s2o_runtime.devices import named_device
    from s2o_runtime.doctor.profile_check import device_findings
    from s2o_runtime.doctor.self_test import self_test

    try:
        where = named_device(device)
    except S2OError as error:
        return [*sections, Section("device", [Finding("device", str(device), str(error), failure_code(error))])]
    sections.append(Section("device", device_findings(where)))
    sections.append(Section("self-test", self_test(where)))

    from s2o_runtime.doctor.profile_check import model_section, model_view, profile_section

    view = None
    if model is not None:
        try:
            view = model_view(model) if view_of is None else view_of(model, profile)
            sections.append(model_section(view))
        except S2OError as error:
            sections.append(Section("model", [Finding("model", model, str(error), failure_code(error))]))
    if profile is not None:
        try:
            sections.append(profile_section(profile, where, view))
        except S2OError as error:
            sections.append(Section("profile", [Finding("profile", str(profile), str(error), failure_code(error))]))
    return sections
