"""GGUF files: what reading them needs, and whether a tokenizer makes the tokens that a file's own vocabulary has.

Transformers makes a tokenizer from the file and may lose merges and special tokens on the way, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from s2o_runtime.errors import ResourceError

SUFFIX = ".gguf"
PACKAGES = ("gguf", "accelerate")  # without either, transformers fails after minutes
SPACES = ("▁", "Ġ")  # how vocabularies write the space before a word: those of SentencePiece, and those of bytes
WORDS = ("people", "because", "between", "different", "important", "capital", "country", "system", "France", "return")


class Vocabulary(NamedTuple):
    """What a GGUF file says of its tokens: their ids by their texts, and whether texts begin with a BOS, if it says."""

    ids: Mapping[str, int]
    adds_bos: bool | None


def check_packages(name: str) -> None:
    """Raises ResourceError if what reads a GGUF file is not installed."""
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        raise ResourceError(
            f"model {name!r} is a GGUF file, and {' and '.join(missing)}, which it is read with, cannot be imported: "
            "in the clone, pip install '.[gguf]'"
        )


def read_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary in a file."""
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    tokens, adds_bos = (fields.get(f"tokenizer.ggml.{name}") for name in ("tokens", "add_bos_token"))
    ids = {token: number for number, token in enumerate(tokens.contents() if tokens else ())}
    return Vocabulary(ids, None if adds_bos is None else bool(adds_bos.contents()))


def wrong_tokens(tokenizer: Any, vocabulary: Vocabulary) -> str | None:
    """What a tokenizer does otherwise than the vocabulary says; None if it is right.

    Common words that are one token in the vocabulary must come out as that token, and a BOS must if the file says so.
    """
    for word in WORDS:
        expected = next((vocabulary.ids[space + word] for space in SPACES if space + word in vocabulary.ids), None)
        ids = tokenizer(f"a {word}", add_special_tokens=False).input_ids
        if expected is not None and ids[-1] != expected:
            return f"it makes the tokens {ids} of 'a {word}', where the file has token {expected} for the last word"
    adds_bos = tokenizer.bos_token_id in tokenizer("a").input_ids[:1]
    if vocabulary.adds_bos not in (None, adds_bos):
        return (
            "it puts no BOS before a text, as the file asks"
            if vocabulary.adds_bos
            else ("it puts a BOS before a text, which the file does not ask for")
        )
    return None
