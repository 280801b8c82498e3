#!/usr/bin/env python3
"""Write the tables of docs/options.md from the fields that state the options.

python -m scripts.docs.options           writes what is between the marker lines
python -m scripts.docs.options --check   writes nothing, and fails if the tables are not those of the code
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from calibrate.evaluation import plan
from calibrate.options import Option, flag
from calibrate.recipe import OPTIONS
from calibrate.tables import Markup, Table, markdown
from s2o_runtime.command_line import EXIT_CODES
from scripts.docs.markdown import between

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"
START, END = "<!-- {}: scripts/docs/options.py writes what is between these lines -->", "<!-- /{} -->"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(argv).check
    old = PAGE.read_text(encoding="utf-8")
    sections = {"s2o-calibrate": options(OPTIONS), "s2o-eval": options(plan.OPTIONS), "exit codes": codes()}
    new = old
    for name, text in sections.items():
        new = between(new, START.format(name), END.format(name), text)
    if check and new != old:
        print(f"options: the tables of {PAGE.name} are not those of the code: run python -m scripts.docs.options")
        return 1
    if not check:
        PAGE.write_text(new, encoding="utf-8")
    return 0


def options(stated: Mapping[str, Option]) -> str:
    """A table for each group of options."""
    groups: dict[str, list[Option]] = {}
    for option in stated.values():
        groups.setdefault(option.group, []).append(option)
    parts = []
    for group, members in groups.items():
        rows = [(flags(option), str(option.rule), option.shown_default, option.help) for option in members]
        parts.append(
            f"**{group[0].upper()}{group[1:]}**\n\n"
            + markdown(Table(("option", "value", "default", "what it is"), rows, align="l"))
        )
    return "\n\n".join(parts)


def flags(option: Option) -> Markup:
    """The flag, and beside that of a switch the one that turns it off."""
    is_switch = option.rule.type is bool and not option.rule.many
    return Markup(f"`{option.flag}`" + f", `{flag(f'no_{option.name}')}`" * is_switch)


def codes() -> str:
    return markdown(
        Table(("code", "meaning"), [(str(code), meaning) for code, meaning in EXIT_CODES.items()], align="l")
    )


if __name__ == "__main__":
    sys.exit(main())
