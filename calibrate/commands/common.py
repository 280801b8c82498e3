"""Running a command, and the flags that mean the same in s2o-calibrate, s2o-profile and s2o-eval."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

from calibrate.machine import CANNOT_WRITE
from s2o_runtime.command_line import OK, call_command
from s2o_runtime.errors import ResourceError
from s2o_runtime.logs import set_up

Flags = Mapping[str, Any]  # the flags that were given, by their names with underscores


def add_output_flags(parser: argparse._ActionsContainer) -> None:
    """Add --json, --quiet, --verbose and --log-json, which every command that writes or measures has."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--quiet", action="store_true", help="no plan and no progress")
    parser.add_argument("--verbose", action="store_true", help="log decisions to standard error, print the whole plan")
    parser.add_argument(
        "--log-json", action="store_true", help="log, progress and errors as JSON lines, as S2O_LOG=json"
    )


def run_command(program: str, flags: Flags, command: Callable[[Flags], int], if_interrupted: str = "") -> int:
    """Run `command(flags)` as `call_command` does, with logs as the flags say, and return its exit code."""
    level = logging.INFO if "verbose" in flags else logging.WARNING
    logging.getLogger("s2o_runtime").setLevel(logging.WARNING)  # the path of each layer is of no interest here
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # every retry without a network would be two lines
    # prompts of many lengths: blocks that one leaves are too short for the next, and stay where they are
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job that is ended stops as with Ctrl-C

    def report_disk_errors() -> int:
        set_up(level, as_json="log_json" in flags, program=program)
        try:
            return command(flags)
        except OSError as error:
            if error.errno not in CANNOT_WRITE:
                raise
            raise ResourceError(
                f"{error.filename or 'a file'} cannot be written or read ({error.strerror}): check the disk and "
                "its permissions"
            ) from error

    return call_command(program, report_disk_errors, if_interrupted)


def print_json(value: Any) -> int:
    """Print a value as JSON and return the exit code OK."""
    print(json.dumps(value, indent=1))
    return OK
