"""Prompts to calibrate on and prompts to prove on, cut to exact token lengths.

The built-in text is the sources of the Python standard library that runs this program, with needles. Users give
their own as JSON lines. No held-out prompt shares a document with a calibration prompt.
"""

from __future__ import annotations

import hashlib
import json
import random
import sysconfig
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
    """The recipe's prompts. Raises InputError if the file is bad or too few prompts are long enough."""
    make = _from_file if recipe.prompts else _built_in
    calibration, held_out = {}, {}
    for length in recipe.lengths:
        prompts = make(recipe, tokenizer, length, recipe.num_prompts + recipe.held_out)
        calibration[length] = prompts[: len(prompts) - recipe.held_out]
        held_out[length] = prompts[len(prompts) - recipe.held_out :]
    for length in recipe.checked_lengths:  # the last ones, as above: no document of theirs was calibrated on
        prompts = make(recipe, tokenizer, length, recipe.num_prompts + recipe.held_out)
        held_out[length] = prompts[len(prompts) - recipe.held_out :]
    return PromptSet(calibration, held_out)


def _from_file(recipe: Recipe, tokenizer: Any, length: int, wanted: int) -> list[Prompt]:
    """Up to `wanted` prompts of the user's file, shuffled by the seed, each cut in its middle."""
    assert recipe.prompts is not None
    texts = read_jsonl(recipe.prompts, tokenizer)
    random.Random(recipe.seed).shuffle(texts)
    found: list[Prompt] = []
    longest = 0
    for text in texts:
        ids = encode(tokenizer, text)
        longest = max(longest, len(ids))
        if len(ids) >= length:
            found.append(Prompt(torch.tensor(ids[: length - length // 2] + ids[len(ids) - length // 2 :])))
        if len(found) == wanted:
            break
    if len(found) <= recipe.held_out:
        raise InputError(
            f"{recipe.prompts} has {len(found)} prompts of {length} tokens or more (the longest has {longest}): "
            f"{recipe.held_out + 1} are needed, add longer prompts or use a shorter length"
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


def _built_in(recipe: Recipe, tokenizer: Any, length: int, wanted: int) -> list[Prompt]:
    """`wanted` prompts of standard library sources; every file is used at most once for one length."""
    rng = random.Random(f"{recipe.seed}/{length}")
    sources = _sources(rng)
    return [_filled(tokenizer, sources, length, rng) for _ in range(wanted)]


def _filled(tokenizer: Any, sources: Iterator[str], length: int, rng: random.Random) -> Prompt:
    """`length` tokens of sources, needles spread over them, their questions at the end."""
    needles = make_needles(min(MAX_NEEDLES, max(1, length // TOKENS_PER_NEEDLE)), rng)
    end: list[int] = []
    codes: list[tuple[int, int]] = []
    for needle in rng.sample(needles, len(needles)):
        first, last = _code_tokens(tokenizer, needle)
        codes.append((len(end) + first, len(end) + last))
        end += encode(tokenizer, needle.question + needle.answer)
    if len(end) > length // 4:
        end = end[: length // 4]
    body = length - len(end)
    facts = [encode(tokenizer, needle.fact) for needle in needles]
    ids = _take(tokenizer, sources, body)
    for index, fact in enumerate(facts):
        place = (index + 1) * body // (len(facts) + 1)
        ids[place : place + len(fact)] = fact
    answers = tuple((body + first, body + last) for first, last in codes if last <= len(end))
    return Prompt(torch.tensor(ids[:body] + end), answers)


def _code_tokens(tokenizer: Any, needle: Needle) -> tuple[int, int]:
    """Which tokens of a question and its answer hold a digit of the code."""
    text = needle.question + needle.answer
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
    begin, end = len(needle.question), len(needle.question) + len(needle.code)
    inside = [index for index, (first, last) in enumerate(places) if first < end and last > begin]
    return inside[0], inside[-1] + 1


def source_text(tokenizer: Any, length: int, rng: random.Random) -> list[int]:
    """`length` tokens of standard library sources."""
    return _take(tokenizer, _sources(rng), length)


def _take(tokenizer: Any, sources: Iterator[str], length: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < length:
        text = next(sources, None)
        if text is None:
            raise InputError(
                f"the standard library's sources are too short for prompts of {length} tokens: "
                "give --prompts FILE.jsonl, or fewer prompts"
            )
        ids += encode(tokenizer, text)
    return ids[:length]


def _sources(rng: random.Random) -> Iterator[str]:
    """The standard library's files, the folders in random order and each folder's files together."""
    root = Path(sysconfig.get_paths()["stdlib"])
    folders: dict[Path, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages"} & set(path.parts):
            folders.setdefault(path.parent, []).append(path)
    files = [(folder, path) for folder, paths in folders.items() for path in paths]
    rng.shuffle(files)  # which file of a folder comes first, and thereby the folders' order
    for folder in dict.fromkeys(folder for folder, _ in files):
        for path in folders[folder]:
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            yield f"# {path.relative_to(root).as_posix()}\n{text}\n"


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids
