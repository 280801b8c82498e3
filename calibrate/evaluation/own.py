"""The user's own prompts: JSON lines with a prompt and the answer that is expected."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from calibrate.prompts.prompt import Prompt
from calibrate.prompts.retrieval import encode, start_of
from s2o_runtime.errors import InputError

EXPECTED = 'expected an object with "prompt" (or chat "messages") and "answer", both texts that are not empty'


def read(paths: Sequence[Path], tokenizer: Any, limit: int) -> list[Prompt]:
    """The prompts of files with their answers behind them. limit: tokens that the model can read.

    Raises InputError naming file and line.
    """
    return [prompt for path in paths for prompt in _read(path, tokenizer, limit)]


def _read(path: Path, tokenizer: Any, limit: int) -> list[Prompt]:
    prompts = []
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            try:
                prompt = _prompt(json.loads(line), tokenizer)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}:{number}: {error}") from error
            if len(prompt.ids) > limit:
                raise InputError(
                    f"{path}:{number}: prompt and answer are {len(prompt.ids)} tokens, beyond the model's limit of "
                    f"{limit}: shorten them"
                )
            prompts.append(prompt)
    if not prompts:
        raise InputError(f"prompt file {path} holds no prompts: {EXPECTED} per line")
    return prompts


def digest(paths: Sequence[Path]) -> str:
    """What names the files' content in the journal."""
    return hashlib.sha256("\n".join(map(_text, paths)).encode()).hexdigest()[:16]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"prompt file {path} cannot be read ({reason}): check the path") from error


def _prompt(entry: Any, tokenizer: Any) -> Prompt:
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
    return Prompt(torch.tensor(before + answer), ((len(before), len(before) + len(answer)),))
