"""Prompts of the standard library's sources alone, with needles."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from calibrate.prompts.needles import make_needles
from calibrate.prompts.prompt import Prompt
from calibrate.prompts.retrieval import Retrieval, needles_in
from calibrate.prompts.stdlib import first_tokens, sources


def built_in(tokenizer: Any, length: int, count: int, seed: int, held_out: bool) -> list[Prompt]:
    """Prompts of the standard library's sources, with needles.

    Args:
        tokenizer: The model's tokenizer.
        length: Tokens of each prompt.
        count: How many prompts. No file is in two of them.
        seed: What draws the text and the needles.
        held_out: Whether the prompts are of the files that are held out, or of the others.

    Raises:
        InputError: The sources are too short.
    """
    rng = random.Random(f"{seed}/{length}/{'held out' if held_out else 'calibration'}")
    used: set[str] = set()
    return [_with_needles(tokenizer, sources(rng, held_out, used), length, rng) for _ in range(count)]


def _with_needles(tokenizer: Any, files: Iterator[str], length: int, rng: random.Random) -> Prompt:
    """`length` tokens of text with needles spread over them; a quarter at most are the questions at the end."""
    needles = make_needles(needles_in(length), rng)
    retrieval = Retrieval.of(tokenizer, needles, rng).within(length // 4)
    text = first_tokens(tokenizer, files, length - len(retrieval.questions))
    ids, answers = retrieval.hidden_in(text, retrieval.positions(0, len(text)))
    return Prompt(torch.tensor(ids), answers)
