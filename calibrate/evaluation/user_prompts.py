"""The user's own prompts: JSON lines with a prompt and the answer that is expected."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from calibrate.prompts.files import parsed_lines, read_text
from calibrate.prompts.prompt import Prompt
from calibrate.prompts.retrieval import encode, start_of

EXPECTED = 'expected an object with "prompt" (or chat "messages") and "answer", both texts that are not empty'


def read_user_prompts(paths: Sequence[Path], tokenizer: Any, limit: int) -> list[Prompt]:
    """The prompts of files with their answers behind them. limit: tokens that the model can read.

    Raises InputError naming file and line.
    """
    return [
        prompt
        for path in paths
        for prompt in parsed_lines(path, lambda entry, _: _prompt(entry, tokenizer, limit), EXPECTED)
    ]


def digest(paths: Sequence[Path]) -> str:
    """What names the files' content in the journal."""
    return hashlib.sha256("\n".join(map(read_text, paths)).encode()).hexdigest()[:16]


def _prompt(entry: Any, tokenizer: Any, limit: int) -> Prompt:
    if not isinstance(entry, dict) or not isinstance(entry.get("answer"), str):
        raise ValueError(EXPECTED)
    if isinstance(entry.get("prompt"), str):
        before = start_of(tokenizer) + encode(tokenizer, entry["prompt"])
    elif isinstance(entry.get("messages"), list):
        text = tokenizer.apply_chat_template(entry["messages"], tokenize=False, add_generation_prompt=True)
        before = encode(tokenizer, str(text))
    else:
        raise ValueError(EXPECTED)
    answer = encode(tokenizer, entry["answer"])
    if not before or not answer:
        raise ValueError(EXPECTED)
    tokens = len(before + answer)
    if tokens > limit:
        raise ValueError(f"prompt and answer are {tokens} tokens, beyond the model's limit of {limit}: shorten them")
    return Prompt(torch.tensor(before + answer), ((len(before), tokens),))
