"""The parser, exit codes and errors of all commands: help by task, one sentence on standard error."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .errors import ResourceError, S2OError
from .fields import SWITCHES, did_you_mean
from .logs import emit_line
from .version import __version__

OK, BAD_INPUT, NOT_PROVEN, NO_RESOURCE, INTERRUPTED = 0, 2, 3, 4, 130
EXIT_CODES = {
    OK: "done",
    BAD_INPUT: "bad input: an option, a file, a profile or a model",
    NOT_PROVEN: "the proof or the certificate failed",
    NO_RESOURCE: "a resource is missing: a GPU or its memory, room on the disk, a lock that another run holds, the Hub,"
    " a package; or the self-test of s2o-doctor fails",
    INTERRUPTED: "interrupted",
}
ALL = "--help-all"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence, and whose help ends with examples.

    examples: pairs of a task, in words, and the arguments that do it. first: the flags that --help shows, where
    --help-all shows all; without any, --help shows all.
    """

    def __init__(
        self, *arguments: Any, examples: Sequence[tuple[str, str]] = (), first: Sequence[str] = (), **named: Any
    ) -> None:  # fmt: skip
        super().__init__(*arguments, **named)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # as in newer Pythons: -1e-4 is a value, not a flag
        self.examples, self.first = tuple(examples), {*first}
        if first:
            self.first |= {"--help", ALL}
            self.add_argument(ALL, action=_HelpAll, nargs=0, help="show every option and stop")

    def error(self, message: str) -> NoReturn:
        self.exit(report_failure(self.prog, BAD_INPUT, message + self._propose_remedy(message)))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but read --flag false and --flag=false as --no-flag."""
        self._given: list[str] = []
        read: list[str] = []
        for argument in sys.argv[1:] if args is None else args:
            self._given += argument.split("=", 1) if self._is_switch(argument.partition("=")[0]) else [argument]
        for word in self._given:
            if read and self._is_switch(read[-1]) and word.lower() in SWITCHES:
                off = SWITCHES[word.lower()] == read[-1].startswith("--no-")
                read[-1] = f"--{'no-' * off}{read[-1].removeprefix('--').removeprefix('no-')}"
            else:
                read.append(word)
        return super().parse_known_args(read, namespace)

    def _is_switch(self, flag: str) -> bool:
        return isinstance(self._option_string_actions.get(flag), argparse.BooleanOptionalAction)

    def _propose_remedy(self, message: str) -> str:
        """Return the remedy for an argument or a command that no parser knows; empty for other errors."""
        otherwise = f"{ALL if self.first else '--help'} lists what there is"
        if choice := re.search(r"invalid choice: '(.*?)' \(", message):
            names = [str(name) for action in self._actions for name in action.choices or ()]
            return f": {did_you_mean(choice[1], names, otherwise)}"
        unknown = re.match(r"unrecognized arguments: (--?[^\s=]+|\S+)", message)
        if unknown is None:
            return ""
        commands = (action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction))
        parsers = [self, *(parser for choices in commands for parser in choices.values())]
        flags = {flag: action for parser in parsers for flag, action in parser._option_string_actions.items()}
        at = self._given.index(unknown[1]) if unknown[1][0] != "-" and unknown[1] in self._given else 0
        for flag in (word.partition("=")[0] for word in reversed(self._given[max(0, at - 2) : at])):
            if (action := flags.get(flag)) is not None:
                several = "," in str(action.metavar)
                value = "no value" if action.nargs == 0 else "commas between values" if several else "one value"
                return f": {flag} takes {'true or false' if '--no-' in str(action.option_strings) else value}"
        first_words = (arguments.partition(" ")[0] for _, arguments in self.examples)  # commands among them
        return f": {did_you_mean(unknown[1], [*flags, *first_words], otherwise)}"

    def print_help(self, file: Any = None) -> None:
        """Print the help with the first flags only, where there are such."""
        later = [action for action in self._actions if self.first and self.first.isdisjoint(action.option_strings)]
        texts = [action.help for action in later]
        for action in later:
            action.help = argparse.SUPPRESS
        super().print_help(file)
        for action, text in zip(later, texts, strict=True):
            action.help = text

    def format_help(self) -> str:
        """Return the help with every flag, and one example for each task."""
        lines = [f"  {task}:\n    {self.prog} {arguments}".rstrip() for task, arguments in self.examples]
        return super().format_help() + ("\nexamples:\n" + "\n".join(lines) + "\n" if lines else "")


class _HelpAll(argparse.Action):
    """Print the help of all flags and stop."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(parser.format_help(), end="")
        parser.exit()


def add_information(parser: argparse._ActionsContainer) -> None:
    """Add --version, which prints the version and stops."""
    parser.add_argument("--version", action="version", version=f"s2o {__version__}", help="print the version")


def describe_exit_codes(*codes: int) -> str:
    """Return the sentence about exit codes at the end of a command's --help: about these, by default about all."""
    return f"Exit codes: {'; '.join(f'{code} {EXIT_CODES[code]}' for code in codes or EXIT_CODES)}."


def call_command(program: str, command: Callable[[], int], if_interrupted: str = "") -> int:
    """Run a command and return its exit code; an `S2OError` that it raises is printed as one sentence.

    if_interrupted: the words after "interrupted".
    """
    try:
        return command()
    except S2OError as error:
        return report_failure(program, get_exit_code(error), str(error))
    except KeyboardInterrupt:
        return report_failure(program, INTERRUPTED, "; ".join(filter(None, ("interrupted", if_interrupted))))


def get_exit_code(error: S2OError) -> int:
    """Return the exit code of an error."""
    return NO_RESOURCE if isinstance(error, ResourceError) else BAD_INPUT


def report_failure(program: str, code: int, sentence: str) -> int:
    """Print why a command failed, on one line, and return its exit code."""
    emit_line(program, f"{program}: {' '.join(sentence.split())}", {"exit_code": code}, logging.ERROR)
    return code
