"""s2o-run: start a program whose transformers models run S2O, without editing it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from s2o_runtime.errors import ProfileError

SITE = Path(__file__).parent / "site"
DESCRIPTION = """\
Run COMMAND so that the transformers models which it starts in Python with SDPA attention, the default, run S2O where
the profile fits them. Other models, and all that S2O is not for, run as without s2o-run.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Becomes the command; returns 2, having said why, if there is no profile that can be used or no such command."""
    args = parser().parse_args(arguments)
    if args.profile is not None:
        os.environ["S2O_PROFILE"] = args.profile
    from s2o_runtime.environment import VARIABLE, environment_profile  # imports torch

    try:
        if environment_profile() is None:
            raise ProfileError(f"{VARIABLE} is not set: set it to a profile's path, or give --profile FILE")
        environment = dict(os.environ) | {VARIABLE: os.path.abspath(os.environ[VARIABLE])}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH"))))
        if args.explain:
            environment["S2O_EXPLAIN"] = "1"
        command = [args.command, *args.arguments]
        os.execvpe(command[0], command, environment)
    except ProfileError as error:
        print(f"s2o-run: {error}", file=sys.stderr)
    except OSError as error:
        print(f"s2o-run: {args.command} cannot be run ({error.strerror}): check the command", file=sys.stderr)
    return 2


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("s2o-run", description=DESCRIPTION, allow_abbrev=False)
    made.add_argument("--profile", metavar="FILE", help="default: what the environment variable S2O_PROFILE names")
    made.add_argument("--explain", action="store_true", help="print what every layer did when a process ends")
    made.add_argument("command", metavar="COMMAND", help="such as python, or a script that is one")
    made.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the command's own")
    return made


if __name__ == "__main__":
    sys.exit(main())
