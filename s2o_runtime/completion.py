"""Shell completion of the commands: `COMMAND --print-completion bash` prints a script for the shell to read."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from s2o_runtime.errors import ResourceError

SHELLS = ("bash", "zsh", "tcsh")
FILES, FOLDERS = ("FILE", "PROFILE"), ("FOLDER",)  # how the placeholder of an option begins that names such a thing


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """A script that completes a command.

    Args:
        parser: of the command.
        shell: one of `SHELLS`.

    Raises:
        ResourceError: shtab, which makes the script, is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise ResourceError(
            "shtab is not installed, which makes completion scripts: pip install 's2o[completion]'"
        ) from None
    _add_commands(parser)
    _name_files(parser, shtab)
    return str(shtab.complete(parser, shell=shell))


def _add_commands(parser: argparse.ArgumentParser) -> None:
    """Make the commands that a program hands to other parsers commands of this one."""
    commands: Mapping[str, Callable[[], argparse.ArgumentParser]] = getattr(parser, "commands", {})
    if commands:
        of_parser = parser.add_subparsers()
        for name, make in commands.items():
            other = make()
            of_parser.add_parser(name, parents=[other], add_help=False, help=other.description)


def _name_files(parser: argparse.ArgumentParser, shtab: Any) -> None:
    """Tell shtab which options take files and folders, and what others may be given, by their placeholders."""
    for action in _actions(parser):
        placeholder = action.metavar if isinstance(action.metavar, str) else ""
        if placeholder.startswith(FILES):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif placeholder.startswith(FOLDERS):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif "|" in placeholder and action.choices is None:
            action.choices = placeholder.split("|")


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """All arguments of a command and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
