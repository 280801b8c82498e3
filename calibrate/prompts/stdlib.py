"""The standard library's sources: the domain "code", and what benches and the evaluation read.

Calibration leaves the files out that are held out here.
"""

from __future__ import annotations

import os
import random
import sysconfig
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from calibrate.prompts.retrieval import encode
from s2o_runtime.errors import InputError

HELD_OUT_FILES = 3  # one of this many of the standard library's files is held out


def library() -> Path:
    """The folder of the standard library that runs this program."""
    return Path(sysconfig.get_paths()["stdlib"])


@lru_cache(maxsize=1)
def library_files() -> tuple[Path, ...]:
    """Its sources, sorted; installed packages are no part of it."""
    files = []
    for folder, folders, names in os.walk(library()):
        folders[:] = [name for name in folders if name not in ("site-packages", "dist-packages")]
        files += [Path(folder) / name for name in names if name.endswith(".py")]
    return tuple(sorted(files))


def is_held_out(name: str) -> bool:
    """Whether a file, named from the library's folder with slashes, is never calibrated on."""
    return zlib.crc32(name.encode()) % HELD_OUT_FILES == 0


def first_tokens(tokenizer: Any, texts: Iterator[str], length: int) -> list[int]:
    """The first `length` tokens of the standard library's sources, one text after another.

    Raises:
        InputError: The texts are too short.
    """
    ids: list[int] = []
    while len(ids) < length:
        text = next(texts, None)
        if text is None:
            raise InputError(
                f"the standard library's sources are too short for prompts of {length} tokens: "
                "give --prompts FILE.jsonl, or fewer prompts"
            )
        ids += encode(tokenizer, text)
    return ids[:length]


def sources(rng: random.Random, held_out: bool | None = None, used: set[str] | None = None) -> Iterator[str]:
    """The standard library's files: its folders in random order, and in each all files from a random one on.

    Files of one folder are alike, so every prompt is to take the folders in an order of its own.

    Args:
        rng: What draws the order.
        held_out: Only the files that are held out (True), or only the others (False); None takes both.
        used: Names of files to leave out. The files that are taken are added to it.

    Yields:
        The text of each file, after a line with its name.
    """
    root = library()
    folders: dict[Path, list[Path]] = {}
    for path in library_files():
        folders.setdefault(path.parent, []).append(path)
    used = set() if used is None else used
    for folder in rng.sample(sorted(folders), len(folders)):
        first = rng.randrange(len(folders[folder]))
        for path in folders[folder][first:] + folders[folder][:first]:
            name = path.relative_to(root).as_posix()
            if name in used or held_out not in (None, is_held_out(name)):
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            used.add(name)
            yield f"# {name}\n{text}\n"
