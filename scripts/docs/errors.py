#!/usr/bin/env python3
"""Write docs/errors.md: provoke the errors that small calls can reach, and list the other messages from the sources.

python -m scripts.docs.errors           writes the page
python -m scripts.docs.errors --check   writes nothing, and fails if the page is not what the code says

Each line of `CASES` is run in an empty folder with a few files (`prepare`): a Python expression or a command.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.docs.error_cases import CASES, namespace, prepare

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "errors.md"
PACKAGES = ("s2o_runtime", "calibrate")
INTRODUCTION = """# Errors

Every error that S2O raises on purpose is one sentence: what was found, what was expected, what to do. In Python it is a
class below `s2o_runtime.S2OError`; a command prints it after its name and ends with an
[exit code](options.md#the-same-in-all-commands): 4 for a `ResourceError`, where the input is right and the machine
cannot serve it now, 2 for all others. Anything else that ends in a traceback is a bug.

`python -m scripts.docs.errors` writes this page. It provokes {provoked} errors by small calls, shown below with what
was done, and lists the other {others} messages of the sources with `…` where a value stands. These need a GPU, a
damaged download, a server, a network, a full disk, or a call that nobody wrote down here yet."""


@dataclass(frozen=True)
class Site:
    """A statement that raises one of the project's errors: its file, its lines, the class and the message.

    template: the message with `…` for each value; None if it is made elsewhere.
    """

    file: str
    first: int
    last: int
    error: str
    template: str | None


@dataclass(frozen=True)
class Provoked:
    """What a case led to: the class ("exit" for what argparse refuses), the exit code, the message, the site."""

    done: str
    error: str
    code: int
    message: str
    site: Site | None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(argv).check
    text = page(tour())
    if check and text != PAGE.read_text(encoding="utf-8"):
        print(f"errors: {PAGE.name} is not what the code says: run python -m scripts.docs.errors")
        return 1
    if not check:
        PAGE.write_text(text, encoding="utf-8")
    return 0


def error_classes() -> set[str]:
    """The names of the project's errors."""
    from s2o_runtime import errors

    return {name for name, value in vars(errors).items() if isinstance(value, type)}


def sites() -> list[Site]:
    """All statements that raise the project's errors, by file and line."""
    names = error_classes()
    return [
        site
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for site in _sites_of(path, names)
    ]


def _sites_of(path: Path, names: set[str]) -> Iterator[Site]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Raise):
            continue
        call = node.exc
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in names:
            file = str(path.relative_to(ROOT))
            yield Site(file, node.lineno, node.end_lineno or node.lineno, call.func.id, _template(call.args[0]))


def _template(message: ast.expr) -> str | None:
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in message.values)
    return None


def tour() -> dict[str, list[Provoked]]:
    """Run all cases, in a folder of their own; what each led to, by topic.

    Raises:
        RuntimeError: a case raised nothing, or something that is none of the project's errors.
    """
    known = sites()
    with _folder():
        prepare(Path())
        names = namespace()
        return {topic: [provoke(done, names, known) for done in cases] for topic, cases in CASES.items()}


@contextmanager
def _folder() -> Iterator[None]:
    """An empty folder as the working directory, without the network."""
    before, offline = os.getcwd(), os.environ.get("HF_HUB_OFFLINE")
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        os.chdir(before)
        shutil.rmtree(folder)
        if offline is None:
            os.environ.pop("HF_HUB_OFFLINE")


def provoke(done: str, names: dict[str, Any], known: Sequence[Site]) -> Provoked:
    """What one case leads to.

    Args:
        done: a Python expression, or a command that starts with "s2o-".
        names: what expressions may use.
        known: all sites.

    Raises:
        RuntimeError: no error of the project.
    """
    from s2o_runtime.command_line import failure_code
    from s2o_runtime.errors import S2OError

    if done.startswith("s2o-"):
        return _provoke_command(done, known)
    try:
        eval(done, names)
    except S2OError as error:
        return Provoked(done, type(error).__name__, failure_code(error), str(error), _site_of(error, known))
    raise RuntimeError(f"{done} raises no error: correct the case")


def _provoke_command(done: str, known: Sequence[Site]) -> Provoked:
    from calibrate.commands import calibrate, evaluate, profile
    from s2o_runtime import command_line
    from s2o_runtime.errors import S2OError

    program, *arguments = shlex.split(done)
    commands = {"s2o-calibrate": calibrate.main, "s2o-profile": profile.main, "s2o-eval": evaluate.main}
    raised: list[S2OError] = []
    original = command_line.failure_code

    def remembered(error: S2OError) -> int:
        raised.append(error)
        return original(error)

    said = io.StringIO()
    command_line.failure_code = remembered
    try:
        with redirect_stderr(said), redirect_stdout(io.StringIO()):
            try:
                code = commands[program](arguments)
            except SystemExit as left:
                code = int(left.code or 0)
    finally:
        command_line.failure_code = original
    lines = said.getvalue().splitlines()
    if code == 0 or not lines or not lines[-1].startswith(f"{program}"):
        raise RuntimeError(f"{done} ends with {code} and says {lines[-1:]}: correct the case")
    message = re.sub(rf"^{program}[\w -]*: ", "", lines[-1])
    if not raised:
        return Provoked(done, "exit", code, message, None)
    return Provoked(done, type(raised[-1]).__name__, code, str(raised[-1]), _site_of(raised[-1], known))


def _site_of(error: BaseException, known: Sequence[Site]) -> Site | None:
    """The statement that raised an error, or the one that raised what it was made of."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for site in known:
            if str(ROOT / site.file) == frame.filename and site.first <= (frame.lineno or 0) <= site.last:
                return site
    return None


def page(provoked: Mapping[str, Sequence[Provoked]]) -> str:
    """The page in Markdown."""
    reached = {(one.site.file, one.site.first) for cases in provoked.values() for one in cases if one.site}
    others = [site for site in sites() if (site.file, site.first) not in reached and site.template]
    count = sum(map(len, provoked.values()))
    parts = [INTRODUCTION.format(provoked=count, others=len(others))]
    for topic, cases in provoked.items():
        parts.append(f"## {topic}\n\n" + "\n".join(map(_entry, cases)))
    parts.append("## Other messages")
    by_file: dict[str, list[str]] = {}
    for site in others:
        by_file.setdefault(site.file, []).append(f"- {_code(str(site.template))} ({site.error})")
    parts += [f"`{file}`\n\n" + "\n".join(dict.fromkeys(lines)) for file, lines in by_file.items()]
    return "\n\n".join(parts) + "\n"


def _entry(one: Provoked) -> str:
    name = "" if one.error == "exit" else f"{one.error}, "
    return f"- {_code(one.done)}\n  > {_code(one.message)} ({name}exit code {one.code})"


def _code(text: str) -> str:
    """Inline code, whatever the text holds."""
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


if __name__ == "__main__":
    sys.exit(main())
