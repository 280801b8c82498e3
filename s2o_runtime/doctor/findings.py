"""What an examination finds: sections of findings, each with a verdict, as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from s2o_runtime.command_line import BAD_INPUT, NO_RESOURCE, OK

WIDTH = 120  # columns of the text
MARKS = {OK: " ", NO_RESOURCE: "!", BAD_INPUT: "!"}
NOTE = "-"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: of the thing, in one or two words.
        value: what was found.
        advice: what was expected and what to do, or a limit that a user should know; empty if there is nothing to say.
        code: the exit code that it asks for: `OK`, `NO_RESOURCE` or `BAD_INPUT`.
    """

    name: str
    value: str
    advice: str = ""
    code: int = OK

    @property
    def verdict(self) -> str:
        """ "ok", "note" for what works with a limit, or "problem"."""
        return "problem" if self.code != OK else "note" if self.advice else "ok"


@dataclass(frozen=True)
class Section:
    """The findings of one concern.

    Attributes:
        name: of the section, a word.
        findings: in the order in which they are printed.
        data: what is known beyond them, for JSON only.
    """

    name: str
    findings: Sequence[Finding]
    data: dict[str, Any] = field(default_factory=dict)


def exit_code(sections: Sequence[Section]) -> int:
    """The exit code: bad input before a missing resource, 0 if there is no problem."""
    codes = {finding.code for section in sections for finding in section.findings}
    return BAD_INPUT if BAD_INPUT in codes else NO_RESOURCE if NO_RESOURCE in codes else OK


def summary(sections: Sequence[Section]) -> str:
    """One sentence at the end."""
    problems = [finding.name for section in sections for finding in section.findings if finding.code != OK]
    if problems:
        return f"not ready: {', '.join(problems)} (marked with !)"
    return "ready"


def as_json(sections: Sequence[Section]) -> dict[str, Any]:
    """The same for programs: whether all is well, the exit code, and every section by its name."""
    code = exit_code(sections)
    return {"ready": code == OK, "exit_code": code} | {
        section.name: {
            "findings": [
                {"name": one.name, "value": one.value, "verdict": one.verdict, "advice": one.advice}
                for one in section.findings
            ]
        }
        | section.data
        for section in sections
    }


def as_text(sections: Sequence[Section]) -> str:
    """Sections as lines; what a user should read is marked: `!` a problem, `-` a note."""
    lines: list[str] = []
    for section in sections:
        width = max((len(finding.name) for finding in section.findings), default=0)
        lines += [section.name]
        for finding in section.findings:
            mark = NOTE if finding.verdict == "note" else MARKS[finding.code]
            text = f"{finding.value}: {finding.advice}" if finding.advice else finding.value
            head = f"{mark} {_printable(finding.name):<{width}}  "
            lines += textwrap.wrap(
                _printable(text), WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
            )
        lines += [""]
    return "\n".join([*lines, summary(sections)])


def _printable(text: str) -> str:
    """The text without control characters: names come from files, messages from compilers."""
    return "".join(character if character.isprintable() else " " for character in text)
