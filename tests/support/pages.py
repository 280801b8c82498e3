"""The pages of the documentation and the commands in them."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DEMO_PROFILE = ROOT / "profiles" / "demo" / "cpu" / "mse-0.0001.safetensors"
PAGES = [
    ROOT / "README.md",
    ROOT / "examples" / "README.md",
    ROOT / "profiles" / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "DESIGN.md",
    ROOT / "scripts" / "bench" / "baselines" / "README.md",
    ROOT / "s2o_runtime" / "profile" / "FORMAT.md",
    ROOT / "docs" / "results" / "architectures.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"(?:^|\s)#\s+(.*)$")
NEED = re.compile(r"\bneeds (.+)$")
ASSIGNMENT = re.compile(r"[A-Z0-9_]+=")


class Command(NamedTuple):
    """A command of a page.

    words: without variables before it and comments. needs: what its comment, or one on a line of its own above it in
    the same block, says that it needs: "an NVIDIA GPU"; None where nothing is said.
    """

    words: tuple[str, ...]
    needs: str | None


def name_of(path):
    return str(path.relative_to(ROOT))


def blocks(path, *languages):
    """The texts of a page's fenced blocks of these languages."""
    return [text for language, text in FENCE.findall(path.read_text(encoding="utf-8")) if language in languages]


def commands(text):
    """The commands of a block of shell lines. What a line of comment needs holds until the next such line."""
    of_lines = None
    for line in text.replace("\\\n", " ").splitlines():
        comment = COMMENT.search(line)
        need = NEED.search(comment[1]) if comment else None
        words = shlex.split(line, comments=True)
        while words and ASSIGNMENT.match(words[0]):
            del words[0]
        if words:
            yield Command(tuple(words), need[1] if need else of_lines)
        elif comment:
            of_lines = need[1] if need else None


def commands_of(path):
    """All commands of a page's shell blocks, in their order."""
    return [command for block in blocks(path, "sh") for command in commands(block)]
