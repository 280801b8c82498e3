"""Tables of docs/options.md, from the fields that state the options."""

from __future__ import annotations

from collections.abc import Mapping

from calibrate.options import Option
from calibrate.tables import Markup, Table, markdown
from s2o_runtime.command_line import EXIT_CODES


def options(stated: Mapping[str, Option]) -> str:
    """A table for each group of options."""
    groups: dict[str, list[Option]] = {}
    for option in stated.values():
        groups.setdefault(option.group, []).append(option)
    parts = []
    for group, members in groups.items():
        rows = [(Markup(f"`{option.flag}`"), str(option.rule), option.shown_default, option.help) for option in members]
        parts.append(
            f"**{group[0].upper()}{group[1:]}**\n\n"
            + markdown(Table(("option", "value", "default", "what it is"), rows, align="l"))
        )
    return "\n\n".join(parts)


def codes() -> str:
    """A table of the exit codes."""
    return markdown(
        Table(("code", "meaning"), [(str(code), meaning) for code, meaning in EXIT_CODES.items()], align="l")
    )
