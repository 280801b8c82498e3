"""A hook of MkDocs: links from docs/ to files outside of it lead to copies of these files in the site.

Pages link to DESIGN.md, to sources and to folders by their paths in the repository, so that they read as plain Markdown
too. In the site, a Markdown file becomes a page, any other file is copied, and a link to a folder becomes plain text. A
link to a file that does not exist is an error.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = "repository"  # the site's folder of copies
PAGES: tuple[str, ...] = ("README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES += ("CODE_OF_CONDUCT.md", "profiles/README.md", "examples/README.md")
PAGES += ("scripts/bench/baselines/README.md", "s2o_runtime/profile/FORMAT.md")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the copies: pages that are linked to from many places, and every other file that a page links to."""
    for path in PAGES:
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, f"{OUTSIDE}/{path}", content=text))
    for file in list(files.documentation_pages()):
        for target in outside_links(file):
            if target not in PAGES and files.get_file_from_path(f"{OUTSIDE}/{target}") is None:
                files.append(File.generated(config, f"{OUTSIDE}/{target}", abs_src_path=str(ROOT / target)))
    return files


def outside_links(file: File) -> set[str]:
    """Paths in the repository of the files outside docs/ that a page links to."""
    targets = {resolved(file.src_uri, link) for _, _, link in links(file.content_string)}
    return {target for target in targets if target and not target.startswith("docs/") and (ROOT / target).is_file()}


def links(text: str) -> list[tuple[str, str, str]]:
    """The links of a page, but for those in code: whether it is an image, text, target."""
    return LINK.findall(FENCE.sub("", text))


def source_of(page: str) -> PurePosixPath:
    """Return where a page of the site is in the repository."""
    path = PurePosixPath(page)
    return path.relative_to(OUTSIDE) if path.parts[0] == OUTSIDE else "docs" / path


def resolved(page: str, link: str) -> str | None:
    """A link's path in the repository; None for an address or a heading of the same page.

    Raises PluginError if nothing is there.
    """
    target = link.partition("#")[0]
    if not target or re.match(r"[a-z]+:", target):
        return None
    path = os.path.normpath(str(source_of(page).parent / target))
    if not (ROOT / path).exists():
        raise PluginError(f"{source_of(page)} links to {path}, which does not exist: mend the link")
    return path


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its links to the copies."""
    uri = page.file.src_uri

    def replaced(match: re.Match[str]) -> str:
        image, text, link = match.groups()
        path = resolved(uri, link)
        if path is None:
            return match[0]
        if (ROOT / path).is_dir():
            return text
        inside = path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}/{path}"
        relative = os.path.relpath(inside, PurePosixPath(uri).parent)
        _, mark, heading = link.partition("#")
        return f"{image}[{text}]({relative}{mark}{heading})"

    parts = FENCE.split(markdown)
    return "".join(part if index % 2 else LINK.sub(replaced, part) for index, part in enumerate(parts))
