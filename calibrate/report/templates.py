"""The templates of pages, which lie beside this file."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from calibrate.machine import MARK
from calibrate.tables import Table, bullets, escaped, markdown

FOLDER = Path(__file__).parent


def environment(*, autoescape: bool) -> Environment:
    """Where templates are found; a name that none of them knows is an error."""
    return Environment(
        loader=FileSystemLoader(FOLDER), autoescape=autoescape, undefined=StrictUndefined, keep_trailing_newline=True
    )


def in_markdown(template: str, **names: Any) -> str:
    """A template's text in Markdown, with one blank line between blocks, below a comment that says who wrote it.

    The filter `text` escapes foreign text.
    """
    templates = environment(autoescape=False)
    templates.filters |= {
        "text": escaped,
        "bullets": bullets,
        "markdown": markdown,
        "facts_table": partial(Table, ("", ""), align="l"),
    }
    title, _, text = re.sub(r"\n{3,}", "\n\n", templates.get_template(template).render(names)).strip().partition("\n")
    return f"{title}\n\n<!-- {MARK} -->\n{text}\n"
