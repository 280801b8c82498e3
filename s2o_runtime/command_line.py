"""What the four commands have in common: exit codes, and errors that are one sentence on standard error."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from s2o_runtime.errors import ResourceError, S2OError

OK, BAD_INPUT, NOT_PROVEN, NO_RESOURCE, INTERRUPTED = 0, 2, 3, 4, 130
EXIT_CODES = {
    OK: "done",
    BAD_INPUT: "bad input: an option, a file, a profile or a model",
    NOT_PROVEN: "the proof or the certificate failed",
    NO_RESOURCE: "a resource is missing: GPU memory, room on the disk, a lock that another run holds, the Hub",
    INTERRUPTED: "interrupted",
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")


def exit_codes(*codes: int) -> str:
    """The sentence about exit codes at the end of a command's --help."""
    return f"Exit codes: {'; '.join(f'{code} {EXIT_CODES[code]}' for code in codes)}."


def exit_code(program: str, command: Callable[[], int], if_interrupted: str = "") -> int:
    """Run a command.

    Args:
        program: its name, which its error begins with.
        command: returns the exit code; an `S2OError` that it raises is printed as one sentence.
        if_interrupted: what is said after "interrupted".

    Returns:
        The exit code.
    """
    try:
        return command()
    except S2OError as error:
        return failed(program, NO_RESOURCE if isinstance(error, ResourceError) else BAD_INPUT, str(error))
    except KeyboardInterrupt:
        return failed(program, INTERRUPTED, f"interrupted; {if_interrupted}" if if_interrupted else "interrupted")


def failed(program: str, code: int, sentence: str) -> int:
    """Print why a command failed, on one line, and return its exit code."""
    print(f"{program}: {' '.join(sentence.split())}", file=sys.stderr)
    return code
