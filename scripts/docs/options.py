#!/usr/bin/env python3
"""Write the tables of docs/options.md from the fields that state the options.

python -m scripts.docs.options           writes what is between the marker lines
python -m scripts.docs.options --check   writes nothing, and fails if the tables are not those of the code
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from calibrate.evaluation import plan
from calibrate.options import Option
from calibrate.recipe import OPTIONS
from calibrate.tables import Markup, Table, markdown
from s2o_runtime.command_line import EXIT_CODES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"
START, END = "<!-- {}: scripts/docs/options.py writes what is between these lines -->", "<!-- /{} -->"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(argv).check
    old = PAGE.read_text(encoding="utf-8")
    new = written(old, {"s2o-calibrate": options(OPTIONS), "s2o-eval": options(plan.OPTIONS), "exit codes": codes()})
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
        rows = [(Markup(f"`{option.flag}`"), str(option.rule), option.shown_default, option.help) for option in members]
        parts.append(
            f"**{group[0].upper()}{group[1:]}**\n\n"
            + markdown(Table(("option", "value", "default", "what it is"), rows, align="l"))
        )
    return "\n\n".join(parts)


def codes() -> str:
    return markdown(
        Table(("code", "meaning"), [(str(code), meaning) for code, meaning in EXIT_CODES.items()], align="l")
    )


def written(page: str, sections: Mapping[str, str]) -> str:
    """The page with its sections between their marker lines. Raises ValueError if a marker is missing."""
    for name, text in sections.items():
        start, end = START.format(name), END.format(name)
        pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
        match = pattern.search(page)
        if match is None:
            raise ValueError(f"{PAGE.name} lacks the lines {start} and {end}: put them where the table belongs")
        body = f"{start}\n\n{text}\n\n{end}"
        page = page[: match.start()] + body + page[match.end() :]
    return page


if __name__ == "__main__":
    sys.exit(main())
