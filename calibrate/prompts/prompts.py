"""Prompts to calibrate on and prompts to prove on, cut to exact token lengths.

The built-in text is the source code of the Python standard library that runs this program, with needles. Users give
their own as JSON lines. No held-out prompt shares a document with a calibration prompt.
"""

from __future__ import annotations

import hashlib
import json
import random
import sysconfig
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibrate.prompts.needles import make_needles
from calibrate.prompts.retrieval import Retrieval, encode
from calibrate.recipe import Recipe
from s2o_runtime.errors import InputError
from s2o_runtime.profile.record import PromptHash, PromptHashes

TOKENS_PER_NEEDLE = 1024
MAX_NEEDLES = 32
HELD_OUT_FILES = 3  # one of this many of the standard library's files is held out


@dataclass(frozen=True)
class Prompt:
    """Token ids, and where the answers stand among them.

    ids: int64 [L]. answers: Each answer that the prompt asks for, as (first token, one behind the last). domain: What
    kind of text it is, such as "code".
    """

    ids: Tensor
    answers: tuple[tuple[int, int], ...] = ()
    domain: str = "code"

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def sha256(self) -> str:
        """The hash that names the prompt in a profile."""
        return hashlib.sha256(self.ids.to(torch.int64).numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a run, by length in tokens.

    calibration: What is calibrated on; a length that is only checked has none. held_out: What layers are adjusted on.
    certify: What the finished choice is certified on; they choose nothing.
    """

    calibration: dict[int, list[Prompt]]
    held_out: dict[int, list[Prompt]]
    certify: dict[int, list[Prompt]] = field(default_factory=dict)

    def record(self) -> PromptHashes:
        """The hashes, for the profile."""
        return PromptHashes(
            calibration=_hashes(self.calibration), held_out=_hashes(self.held_out), certify=_hashes(self.certify)
        )


def _hashes(by_length: Mapping[int, Sequence[Prompt]]) -> tuple[PromptHash, ...]:
    return tuple(
        PromptHash(length=length, sha256=prompt.sha256) for length, prompts in by_length.items() for prompt in prompts
    )


def load_prompts(recipe: Recipe, tokenizer: Any) -> PromptSet:
    """The recipe's prompts: the user's, or the built-in ones.

    Documents are held out once for all lengths, so that none is calibrated on at one length and proven on at another.

    Args:
        recipe: The lengths, how many prompts of each, and the seed.
        tokenizer: The model's tokenizer.

    Raises:
        InputError: The prompt file is bad, or too few prompts are long enough.
    """
    texts = [] if recipe.prompts is None else read_jsonl(recipe.prompts, tokenizer)
    random.Random(recipe.seed).shuffle(texts)

    def prompts_of(length: int, count: int, *, held_out: bool) -> list[Prompt]:
        if recipe.prompts is None:
            return built_in(tokenizer, length, count, recipe.seed, held_out)
        return _from_texts(texts, recipe, tokenizer, length, count, held_out)

    lengths = (*recipe.lengths, *recipe.checked_lengths)
    certify = {length: _to_certify_on(recipe, tokenizer, texts, length) for length in lengths if recipe.num_certify}
    return PromptSet(
        calibration={length: prompts_of(length, recipe.num_prompts, held_out=False) for length in recipe.lengths},
        held_out={length: prompts_of(length, recipe.held_out, held_out=True) for length in lengths},
        certify=certify,
    )


def _to_certify_on(recipe: Recipe, tokenizer: Any, texts: list[str], length: int) -> list[Prompt]:
    """The prompts of the certificate; of the user's texts as many as there are behind those that were asked for."""
    if recipe.prompts is not None:
        rest = texts[recipe.num_prompts + recipe.held_out :]
        encoded = (encode(tokenizer, text) for text in rest)
        return [Prompt(torch.tensor(ids[:length])) for ids in encoded if len(ids) >= length][: recipe.num_certify]
    rng, used = random.Random(f"{recipe.seed}/{length}/certify"), set[str]()
    return [
        _with_needles(tokenizer, sources(rng, True, used, certify=True), length, rng) for _ in range(recipe.num_certify)
    ]


def _from_texts(
    texts: list[str], recipe: Recipe, tokenizer: Any, length: int, count: int, held_out: bool
) -> list[Prompt]:
    """Up to `count` prompts of the user's texts, each cut in its middle; of those held out no fewer."""
    period = recipe.num_prompts + recipe.held_out  # the first of every so many texts are held out
    prompts: list[Prompt] = []
    longest = 0
    for number, text in enumerate(texts):
        if (number % period < recipe.held_out) != held_out:
            continue
        ids = encode(tokenizer, text)
        longest = max(longest, len(ids))
        if len(ids) >= length:
            prompts.append(Prompt(torch.tensor(ids[: length - length // 2] + ids[len(ids) - length // 2 :])))
        if len(prompts) == count:
            break
    needed = count if held_out else 1
    if len(prompts) < needed:
        purpose = "to prove on" if held_out else "to calibrate on"
        raise InputError(
            f"{recipe.prompts} has {len(prompts)} prompts {purpose} of {length} tokens or more (the longest has "
            f"{longest}): at least {needed} must be, add longer prompts or use a shorter length"
        )
    return prompts


def read_jsonl(path: Path, tokenizer: Any) -> list[str]:
    """The texts of a JSON lines file: objects with "text", "prompt" or chat "messages", or plain strings.

    Raises:
        InputError: The file cannot be read or has no prompts, or a line is none; it names file and line.
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
    """Prompts of the standard library's sources, with needles.

    Args:
        tokenizer: The model's tokenizer.
        length: Tokens of each prompt.
        count: How many prompts. No file is in two of them.
        seed: What draws the text and the needles.
        held_out: Whether the prompts are to prove on; they share no file with those to calibrate on.

    Raises:
        InputError: The sources are too short.
    """
    rng = random.Random(f"{seed}/{length}/{'held out' if held_out else 'calibration'}")
    used: set[str] = set()
    return [_with_needles(tokenizer, sources(rng, held_out, used), length, rng) for _ in range(count)]


def _with_needles(tokenizer: Any, files: Iterator[str], length: int, rng: random.Random) -> Prompt:
    """`length` tokens of text with needles spread over them; a quarter at most are the questions at the end."""
    needles = make_needles(min(MAX_NEEDLES, max(1, length // TOKENS_PER_NEEDLE)), rng)
    retrieval = Retrieval.of(tokenizer, needles, rng).within(length // 4)
    text = first_tokens(tokenizer, files, length - len(retrieval.questions))
    ids, answers = retrieval.hidden_in(text, retrieval.positions(0, len(text)))
    return Prompt(torch.tensor(ids), answers)


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


def sources(
    rng: random.Random, held_out: bool | None = None, used: set[str] | None = None, certify: bool = False
) -> Iterator[str]:
    """The standard library's files: its folders in random order, and in each all files from a random one on.

    Files of one folder are alike, so every prompt is to take the folders in an order of its own.

    Args:
        rng: What draws the order.
        held_out: Only the files that are held out (True), or only the others (False); None takes both.
        used: Names of files to leave out. The files that are taken are added to it.

    Yields:
        The text of each file, after a line with its name.
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
            if certify and zlib.crc32(name.encode()) % (2 * HELD_OUT_FILES) == 0:
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            used.add(name)
            yield f"# {name}\n{text}\n"
