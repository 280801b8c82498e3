"""Needles: short facts hidden in a long text, and the questions that ask for them.

A needle is one line that states a five-digit code for a word. Its question, much later, repeats the word and states the
code again: teacher-forced, a model that can look back predicts all five digits. The training of the demo model, the
prompts and the evaluation all take the wording from here.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from importlib import resources
from typing import Any


def read_texts(name: str) -> Any:
    """Return the JSON of a file in texts/: lists that generated text and facts are drawn from, whose order counts."""
    return json.loads((resources.files("calibrate.prompts") / "texts" / f"{name}.json").read_text(encoding="utf-8"))


WORDS: list[str] = read_texts("words")["words"]
DIGITS = 5


@dataclass(frozen=True)
class Needle:
    """A hidden fact and its question, as text.

    fact: the line that is hidden in the text. question: up to where the answer is due. code: what answers it.
    """

    fact: str
    question: str
    code: str

    @property
    def answer(self) -> str:
        """The code, as it follows the question."""
        return f"{self.code}.\n"


def needle_of(key: str, code: str) -> Needle:
    """The needle that states a code for a key."""
    return Needle(
        f"\n# The secret code for {key} is {code}.\n",
        f"\n# What is the secret code for {key}? The secret code for {key} is ",
        code,
    )


def make_needles(count: int, rng: random.Random) -> list[Needle]:
    """`count` needles with distinct words and random codes.

    Raises:
        ValueError: There are fewer than `count` words.
    """
    if count > len(WORDS):
        raise ValueError(f"{count} needles were asked for, but there are {len(WORDS)} distinct words")
    return [needle_of(word, random_code(rng)) for word in rng.sample(WORDS, count)]


def random_code(rng: random.Random) -> str:
    """A code of `DIGITS` digits."""
    return "".join(rng.choices("0123456789", k=DIGITS))
