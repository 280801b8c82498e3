"""The report as one page of Markdown, beside the profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import quote

from calibrate.report.page import (
    Block,
    Bullets,
    Facts,
    Grid,
    Heading,
    HeadMaps,
    Listing,
    Paragraph,
    Picture,
    Strong,
    Verbatim,
)
from calibrate.tables import Table, bullets, escaped, markdown


def markdown_page(blocks: Iterable[Block], pictures: Mapping[str, str]) -> str:
    """The page in Markdown.

    Args:
        blocks: What it says.
        pictures: The file of each picture, a name beside the page, by the pictures' names.
    """
    return "\n\n".join(text for block in blocks if (text := _text(block, pictures))) + "\n"


def _text(block: Block, pictures: Mapping[str, str]) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {escaped(text)}"
        case Paragraph(parts):
            return "".join(map(_inline, parts))
        case Bullets(lines):
            return bullets(lines)
        case Grid(table):
            return markdown(table)
        case Facts(rows):
            return markdown(Table(("", ""), rows, align="l"))
        case Listing(text, language):
            return f"```{language}\n{text}\n```"
        case Picture(name, caption) | HeadMaps(Picture(name, caption)):
            return f"![{name}]({quote(pictures[name])})\n\n{caption}"


def _inline(text: str) -> str:
    if isinstance(text, Verbatim):
        return f"`{text}`"
    return f"**{escaped(text)}**" if isinstance(text, Strong) else escaped(text)
