"""The user's own prompts: JSON entries with a prompt and the answer that is expected."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from calibrate.prompts.assembly import encode_served
from calibrate.prompts.documents import check_text, document_of, parse_entries, read_text
from calibrate.prompts.prompt import Prompt
from calibrate.prompts.retrieval import encode

EXPECTED = 'expected an object with "prompt" (or chat "messages") and "answer", both texts that are not empty'


def read_user_prompts(paths: Sequence[Path], tokenizer: Any, limit: int) -> list[Prompt]:
    """Read the prompts of files with their answers behind them. limit: tokens that the model can read.

    Raises InputError naming file and line.
    """
    return [
        prompt
        for path in paths
        for prompt in parse_entries(path, lambda entry, _: _prompt(entry, tokenizer, limit), EXPECTED)
    ]


def digest(paths: Sequence[Path]) -> str:
    """Return the name of the files' content in the journal."""
    return hashlib.sha256("\n".join(map(read_text, paths)).encode()).hexdigest()[:16]


def _prompt(entry: Any, tokenizer: Any, limit: int) -> Prompt:
    answer = entry.pop("answer", None) if isinstance(entry, dict) else None
    if not isinstance(answer, str):
        raise ValueError(EXPECTED)
    before = encode_served(tokenizer, document_of(entry, "", "", EXPECTED))
    after = encode(tokenizer, check_text(answer))
    tokens = len(before + after)
    if not before or not after:  # a tokenizer may drop what it does not know
        raise ValueError(EXPECTED)
    if tokens > limit:
        raise ValueError(f"prompt and answer are {tokens} tokens, beyond the model's limit of {limit}: shorten them")
    return Prompt(torch.tensor(before + after), ((len(before), tokens),))
