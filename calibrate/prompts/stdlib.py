"""Prompts of the standard library's sources alone, which benchmarks, examples and the evaluation read.

Calibration's domain "code" leaves the files out that are held out here.
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

import torch

from calibrate.prompts.needles import make_needles
from calibrate.prompts.prompt import Prompt
from calibrate.prompts.retrieval import Retrieval, encode, needles_in, spread, start_of, with_facts
from s2o_runtime.errors import InputError

HELD_OUT_FILES = 3  # one of this many of the standard library's files is held out


@lru_cache(maxsize=1)
def library_files() -> dict[str, Path]:
    """List the sources of the standard library that runs this program, in order, without installed packages.

    Returns:
        Their paths by their names, which are their paths from the library's folder with slashes.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in ("site-packages", "dist-packages")]
        files += [Path(folder) / name for name in names if name.endswith(".py")]
    return {path.relative_to(root).as_posix(): path for path in sorted(files)}


def read_source(name: str) -> str | None:
    """Return the text of one of `library_files` after a line with its name; None if it cannot be read."""
    try:
        return f"# {name}\n{library_files()[name].read_text(encoding='utf-8')}\n"
    except (OSError, UnicodeDecodeError):
        return None


def is_held_out(name: str) -> bool:
    """Whether a file, named from the library's folder with slashes, is never calibrated on."""
    return zlib.crc32(name.encode()) % HELD_OUT_FILES == 0


def built_in(tokenizer: Any, length: int, count: int, seed: int) -> list[Prompt]:
    """Make prompts of the standard library's sources that are held out, with needles.

    Args:
        tokenizer: the model's tokenizer.
        length: tokens of each prompt.
        count: how many prompts. No file is in two of them.
        seed: what draws the text and the needles.

    Raises:
        InputError: The sources are too short.
    """
    rng = random.Random(f"{seed}/{length}/held out")
    used: set[str] = set()
    return [_with_needles(tokenizer, sources(rng, used), length, rng) for _ in range(count)]


def _with_needles(tokenizer: Any, files: Iterator[str], length: int, rng: random.Random) -> Prompt:
    """`length` tokens of text with needles spread over them; a quarter at most are the questions at the end."""
    needles = make_needles(needles_in(length), rng)
    retrieval = Retrieval.of(tokenizer, needles, rng).within(length // 4)
    text = first_tokens(tokenizer, files, length - len(retrieval.questions))
    ids, answers = retrieval.hidden_in(text, len(start_of(tokenizer)))
    return Prompt(torch.tensor(ids), answers)


def one_text(tokenizer: Any, length: int, count: int, rng: random.Random) -> tuple[list[list[int]], list[str]]:
    """Prompts that hide the same codes in the same held-out text, and each ask for another of them.

    Args:
        tokenizer: the model's tokenizer.
        length: tokens of the longest prompt.
        count: how many codes, and prompts.
        rng: what draws the text and the codes.

    Returns:
        Each prompt's token ids, and the codes that answer them.
    """
    needles = make_needles(count, rng)
    retrieval = Retrieval.of(tokenizer, needles, rng)
    questions = [encode(tokenizer, needle.question) for needle in needles]
    text = first_tokens(tokenizer, sources(rng), length - max(map(len, questions)))
    text = with_facts(text, retrieval.facts, spread(count, len(start_of(tokenizer)), len(text)))
    return [text + question for question in questions], [needle.code for needle in needles]


def first_tokens(tokenizer: Any, texts: Iterator[str], length: int) -> list[int]:
    """Return `length` tokens: the tokenizer's own first ones, and then the standard library's sources in turn.

    Raises:
        InputError: The texts are too short.
    """
    ids = start_of(tokenizer)
    while len(ids) < length:
        text = next(texts, None)
        if text is None:
            raise InputError(
                f"the standard library's sources are too short for prompts of {length} tokens: "
                "give --prompts FILE.jsonl, or fewer prompts"
            )
        ids += encode(tokenizer, text)
    return ids[:length]


def sources(rng: random.Random, used: set[str] | None = None) -> Iterator[str]:
    """Yield the held-out files' texts: folders in random order, and in each all files from a random one on.

    Files of one folder are alike, so every prompt is to take the folders in an order of its own.

    Args:
        rng: what draws the order.
        used: names of files to leave out. The files that are taken are added to it.
    """
    folders: dict[Path, list[str]] = {}
    for name, path in library_files().items():
        folders.setdefault(path.parent, []).append(name)
    used = set() if used is None else used
    for folder in rng.sample(sorted(folders), len(folders)):
        first = rng.randrange(len(folders[folder]))
        for name in folders[folder][first:] + folders[folder][:first]:
            if name not in used and is_held_out(name) and (text := read_source(name)) is not None:
                used.add(name)
                yield text
