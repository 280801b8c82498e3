"""s2o-doctor: from flags to findings, and an exit code for scripts. Torch is imported after the flags are read."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..command_line import (
    BAD_INPUT,
    INTERRUPTED,
    NO_RESOURCE,
    OK,
    Parser,
    add_information,
    call_command,
    describe_exit_codes,
    get_exit_code,
)
from ..errors import S2OError
from ..logs import set_up
from .findings import Finding, Section, check_environment, check_variables, choose_exit_code, render_json, render_text

if TYPE_CHECKING:
    from .profile_check import ModelView

    FindModel = Callable[[str, Path | None], ModelView]

PROGRAM = "s2o-doctor"
EXAMPLES = (
    ("see what is installed here and whether the kernels compute what they should", ""),
    ("see what a profile would run on this machine", "--profile profiles/demo/cpu/mse-0.0001.safetensors"),
    ("check that a profile is of a model, in a script", "--profile p.safetensors --model my/model --json"),
)


def build_parser(program: str = PROGRAM) -> Parser:
    """Return the parser of the flags."""
    out = Parser(
        program,
        description="Say what is installed here, test the kernels against the reference in seconds, and with a profile "
        "or a model which layers would run S2O, which dense, and why.",
        epilog=describe_exit_codes(OK, BAD_INPUT, NO_RESOURCE, INTERRUPTED),
        examples=EXAMPLES,
    )
    out.add_argument("--profile", type=Path, metavar="FILE", help="what this profile would run here")
    out.add_argument("--model", metavar="NAME", help="as of s2o-calibrate: its layers, and if it is the profile's")
    out.add_argument("--device", metavar="NAME", help="cuda, cuda:1 or cpu (default a GPU if there is one)")
    out.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_information(out)
    return out


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM, view_of: FindModel | None = None) -> int:
    """Run the command and return its exit code.

    It is 0 if all is well, 2 for a flag, a profile or a model that is wrong or do not fit one another, 4 where torch or
    the GPU cannot be used or the self-test fails. `view_of` finds a model by its name, and may say more of it at the
    profile's lengths; by default it is transformers' configuration of a folder or hub id.
    """
    args = build_parser(program).parse_args(arguments)

    def run() -> int:
        set_up(logging.ERROR, as_json=False)  # what the runtime would warn about is among the findings
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
        sections = examine(args.profile, args.model, args.device, view_of)
        print(json.dumps(render_json(sections), indent=1) if args.json else render_text(sections))
        return choose_exit_code(sections)

    return call_command(program, run)


def examine(
    profile: Path | None = None, model: str | None = None, device: str | None = None, view_of: FindModel | None = None
) -> list[Section]:
    """Return all that s2o-doctor finds for its flags, in the order in which it is printed. view_of: as for `main`."""
    installed = check_environment(wants_gpu=device != "cpu")
    if any(finding.name == "torch" and finding.code for finding in installed):
        return [Section("environment", installed)]  # nothing else can be looked at
    sections = [Section("environment", [*installed, *check_variables()])]

    from ..devices import get_device
    from .profile_check import check_device, describe_model, describe_profile, find_model
    from .self_test import run_self_test

    where = view = None
    with _report_errors(sections, "device", device):
        where = get_device(device)
        sections.append(Section("device", check_device(where)))
        sections.append(Section("self-test", run_self_test(where)))
    if where is None:
        return sections
    if model is not None:
        with _report_errors(sections, "model", model):
            view = find_model(model) if view_of is None else view_of(model, profile)
            sections.append(describe_model(view))
    if profile is not None:
        with _report_errors(sections, "profile", profile):
            sections.append(describe_profile(profile, where, view))
    return sections


@contextmanager
def _report_errors(sections: list[Section], name: str, value: object) -> Iterator[None]:
    """Add an error of the block as a section of its own."""
    try:
        yield
    except S2OError as error:
        sections.append(Section(name, [Finding(name, str(value), str(error), get_exit_code(error))]))
