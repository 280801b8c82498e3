"""Prompts to calibrate on and prompts to prove on, cut to exact token lengths.

The built-in text is the sources of the Python standard library that runs this program, with needles. Users give
their own as JSON lines. No held-out prompt shares a document with a calibration prompt.
"""

from __future__ import annotations

import hashlib
import json
import random
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibrate.needles import Needle, make_needles
from calibrate.recipe import Recipe
from s2o_runtime.errors import InputError

TOKENS_PER_NEEDLE = 1024
MAX_NEEDLES = 32
HELD_OUT_FILES = 3  # one of so many of the standard library's files is held out


@dataclass(frozen=True)
class Prompt:
    """Token ids [L] and the hash that names them in a profile.

    answers: where the codes stand that the prompt asks for, as (first token, one behind the last).
    """

    ids: Tensor
    answers: tuple[tuple[int, int], ...] = ()

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.ids.to(torch.int64).numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class PromptSet:
    """For every length, the prompts to calibrate on (none where it is only checked) and the ones held out."""

    calibration: dict[int, list[Prompt]]
    held_out: dict[int, list[Prompt]]

    def record(self) -> dict[str, Any]:
        """The hashes, for the profile."""
        return {
            kind: [{"length": length, "sha256": prompt.sha256} for length in prompts for prompt in prompts[length]]
            for kind, prompts in (("calibration", self.calibration), ("held_out", self.held_out))
        }


def load_prompts(recipe: Recipe, tokenizer: Any) -> PromptSet:
    """The recipe's prompts. Raises InputError if the file is bad or too few prompts are long enough.

    Documents are held out once for all lengths, so that none is calibrated on at one and proven on at another.
    """
    texts = [] if recipe.prompts is None else read_jsonl(recipe.prompts, tokenizer)
    random.Random(recipe.seed).shuffle(texts)

    def made(length: int, count: int, held_out: bool) -> list[Prompt]:
        if recipe.prompts is None:
            return built_in(tokenizer, length, count, recipe.seed, held_out)
        return _from_texts(texts, recipe, tokenizer, length, count, held_out)

    lengths = (*recipe.lengths, *recipe.checked_lengths)
    return PromptSet(
        {length: made(length, recipe.num_prompts, False) for length in recipe.lengths},
        {length: made(length, recipe.held_out, True) for length in lengths},
    )


def _from_texts(
    texts: list[str], recipe: Recipe, tokenizer: Any, length: int, count: int, held_out: bool
) -> list[Prompt]:
    """Up to `count` prompts of the user's texts, each cut in its middle; of those held out no fewer."""
    every = recipe.num_prompts + recipe.held_out
    found: list[Prompt] = []
    longest = 0
    for place, text in enumerate(texts):
        if (place % every < recipe.held_out) != held_out:
            continue
        ids = encode(tokenizer, text)
        longest = max(longest, len(ids))
        if len(ids) >= length:
            found.append(Prompt(torch.tensor(ids[: length - length // 2] + ids[len(ids) - length // 2 :])))
        if len(found) == count:
            break
    needed = count if held_out else 1
    if len(found) < needed:
        kind = "to prove on" if held_out else "to calibrate on"
        raise InputError(
            f"{recipe.prompts} has {len(found)} prompts {kind} of {length} tokens or more (the longest has {longest}): "
            f"at least {needed} must be, add longer prompts or use a shorter length"
        )
    return found


def read_jsonl(path: Path, tokenizer: Any) -> list[str]:
    """The texts of a JSON lines file: objects with "text", "prompt" or chat "messages", or plain strings.

    Raises InputError naming file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"prompt file {path} cannot be read ({reason}): check the path") from error
    texts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                texts.append(_text_of(json.loads(line), tokenizer))
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}:{number}: {error}") from error
    if not texts:
        raise InputError(f"prompt file {path} holds no prompts: expected one JSON object with a text per line")
    return texts


def _text_of(entry: Any, tokenizer: Any) -> str:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, dict):
        for key in ("text", "prompt"):
            if isinstance(entry.get(key), str):
                return str(entry[key])
        if isinstance(entry.get("messages"), list):
            return str(tokenizer.apply_chat_template(entry["messages"], tokenize=False, add_generation_prompt=True))
    raise ValueError('expected a string, or an object with "text", "prompt" or "messages"')


def built_in(tokenizer: Any, length: int, count: int, seed: int, held_out: bool) -> list[Prompt]:
    """`count` prompts of standard library sources; every file is used at most once for one length and seed."""
    rng = random.Random(f"{seed}/{length}/{'held out' if held_out else 'calibration'}")
    used: set[str] = set()
    return [_filled(tokenizer, sources(rng, held_out, used), length, rng) for _ in range(count)]


def _filled(tokenizer: Any, files: Iterator[str], length: int, rng: random.Random) -> Prompt:
    """`length` tokens of sources, needles spread over them, their questions at the end."""
    needles = make_needles(min(MAX_NEEDLES, max(1, length // TOKENS_PER_NEEDLE)), rng)
    end: list[int] = []
    codes: list[tuple[int, int]] = []
    for needle in rng.sample(needles, len(needles)):
        first, last = code_tokens(tokenizer, needle)
        codes.append((len(end) + first, len(end) + last))
        end += encode(tokenizer, needle.question + needle.answer)
    if len(end) > length // 4:
        end = end[: length // 4]
    body = length - len(end)
    facts = [encode(tokenizer, needle.fact) for needle in needles]
    ids = _take(tokenizer, files, body)
    for index, fact in enumerate(facts):
        place = (index + 1) * body // (len(facts) + 1)
        ids[place : place + len(fact)] = fact
    answers = tuple((body + first, body + last) for first, last in codes if last <= len(end))
    return Prompt(torch.tensor(ids[:body] + end), answers)


def code_tokens(tokenizer: Any, needle: Needle) -> tuple[int, int]:
    """Which tokens of a question and its answer hold a digit of the code."""
    text = needle.question + needle.answer
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
    begin, end = len(needle.question), len(needle.question) + len(needle.code)
    inside = [index for index, (first, last) in enumerate(places) if first < end and last > begin]
    return inside[0], inside[-1] + 1


def source_text(tokenizer: Any, length: int, rng: random.Random) -> list[int]:
    """`length` tokens of standard library sources."""
    return _take(tokenizer, sources(rng), length)


def _take(tokenizer: Any, files: Iterator[str], length: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < length:
        text = next(files, None)
        if text is None:
            raise InputError(
                f"the standard library's sources are too short for prompts of {length} tokens: "
                "give --prompts FILE.jsonl, or fewer prompts"
            )
        ids += encode(tokenizer, text)
    return ids[:length]


def sources(rng: random.Random, held_out: bool | None = None, used: set[str] | None = None) -> Iterator[str]:
    """The standard library's files: folders in random order, of each its files from a random one on.

    Prompts that begin in the same folder are alike, so every prompt takes an order of its own.
    held_out: only the files that are held out, or only the others. used: names of files to leave out; those that are
    taken join them.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    folders: dict[Path, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages"} & set(path.parts):
            folders.setdefault(path.parent, []).append(path)
    used = set() if used is None else used
    for folder in rng.sample(sorted(folders), len(folders)):
        first = rng.randrange(len(folders[folder]))
        for path in folders[folder][first:] + folders[folder][:first]:
            name = path.relative_to(root).as_posix()
            if name in used or held_out not in (None, zlib.crc32(name.encode()) % HELD_OUT_FILES == 0):
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            used.add(name)
            yield f"# {name}\n{text}\n"


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids
