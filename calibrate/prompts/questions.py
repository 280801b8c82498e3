"""Questions about a prompt, each a turn of its own behind it: the rows that a user reads.

A question quotes some words of the prompt and asks for what follows them, so its answer needs the keys and values that
the prompt's layers have left there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from calibrate.prompts.retrieval import encode

EIGHTHS = 8  # parts of a prompt that are told apart, in errors and in answers
# what one sparse prefill does differs more from question to question than from prompt to prompt: of a prompt's mean of
# eight questions 0.9 of the variance was theirs (docs/results/answer-variance.txt), and a question costs less
PER_EIGHTH = 2  # questions
QUOTED, ANSWERED = 24, 32  # tokens of a quote, and of the answer that follows it
ASK = "\n\nRepeat the text above from these words on:\n"


@dataclass(frozen=True)
class Question:
    """A question about one part of a prompt.

    ids: the tokens of the question. answer: those of the document that answer it.
    """

    ids: list[int]
    answer: list[int]


def ask_about(tokenizer: Any, ids: Sequence[int]) -> list[Question]:
    """Return `PER_EIGHTH` questions about each eighth of a prompt, or one about each part that has room, in order.

    The same token ids give the same questions.
    """
    rng, ask = random.Random(repr(list(ids))), encode(tokenizer, ASK)
    parts = max(1, min(EIGHTHS * PER_EIGHTH, len(ids) // (2 * (QUOTED + ANSWERED))))
    questions = []
    for part in range(parts):
        first, end = part * len(ids) // parts, (part + 1) * len(ids) // parts - QUOTED - ANSWERED
        at = rng.randrange(first, max(end, first + 1))
        quote, answer = ids[at : at + QUOTED], ids[at + QUOTED : at + QUOTED + ANSWERED]
        questions.append(Question([*ask, *quote], list(answer)))
    return questions
