"""Facts hidden in prompts and the questions that ask for them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import product
from typing import Any

DIGITS = 5  # of a code
MAX_QUESTIONS = 64  # questions of a prompt for which there are names
TOKENS_PER_NEEDLE = 1024
MAX_NEEDLES = 32

Span = tuple[int, int]  # the first token and the one behind the last


def read_texts(name: str) -> Any:
    """Return the JSON of a file in texts/: lists that generated text and facts are drawn from, whose order counts."""
    return json.loads((resources.files("calibrate.prompts") / "texts" / f"{name}.json").read_text(encoding="utf-8"))


LISTS_OF_WORDS: dict[str, list[Any]] = read_texts("words")
WORDS: list[str] = LISTS_OF_WORDS["words"]


@dataclass(frozen=True)
class Needle:
    """A fact, the line that is hidden in a text; its question, up to where the answer is due; the answer, a code."""

    fact: str
    question: str
    code: str

    @property
    def answer(self) -> str:
        """The code, as it follows the question."""
        return f"{self.code}.\n"


def make_needles(count: int, rng: random.Random) -> list[Needle]:
    """Draw `count` needles with distinct words and random codes. Raises ValueError if there are fewer words."""
    if count > len(WORDS):
        raise ValueError(f"{count} needles were asked for, but there are {len(WORDS)} distinct words")
    needles = []
    for word in rng.sample(WORDS, count):
        code = "".join(rng.choices("0123456789", k=DIGITS))
        question = f"\n# What is the secret code for {word}? The secret code for {word} is "
        needles.append(Needle(f"\n# The secret code for {word} is {code}.\n", question, code))
    return needles


def _write_people(count: int, rng: random.Random) -> list[Needle]:
    """Draw sentences about people; ask in other words, by turns for a city, a profession and a name."""
    words = LISTS_OF_WORDS
    names = list(product(words["first_names"], words["last_names"]))
    places = list(product(words["cities"], words["jobs"]))
    people, homes = rng.sample(names, count), rng.sample(places, count)
    asked = []
    for number, ((first, last), (city, job)) in enumerate(zip(people, homes, strict=True)):
        name = f"{first} {last}"
        question, answer = (
            (f"In which city does {name} live now? {name} lives in", city),
            (f"What is the profession of {name}? {name} is a", job),
            (f"Who is the {job} in {city}? The {job} in {city} is", name),
        )[number % 3]
        asked.append(Needle(f"\n# {name} moved to {city} to work as a {job}.\n", f"\n# {question} ", answer))
    return asked


FACTS: dict[str, Callable[[int, random.Random], list[Needle]]] = {"needles": make_needles, "questions": _write_people}


@dataclass(frozen=True)
class Retrieval:
    """The token ids that a retrieval prompt has besides its text.

    facts: each fact, in the order of the text. questions: the end of the prompt, each followed by its answer. answers:
    the codes' spans among the tokens of `questions`.
    """

    facts: list[list[int]]
    questions: list[int]
    answers: list[Span]

    @classmethod
    def from_needles(cls, tokenizer: Any, asked: Sequence[Needle], rng: random.Random) -> Retrieval:
        """Tokenize the facts of needles, and their questions in random order."""
        questions: list[int] = []
        answers: list[Span] = []
        ordered = rng.sample(asked, len(asked))
        texts = [f"{needle.question}{needle.answer}" for needle in ordered]
        options = {"add_special_tokens": False, "return_offsets_mapping": True, "return_attention_mask": False}
        encoded: Any = tokenizer(texts, **options) if texts else None
        for row, needle in enumerate(ordered):
            begin = len(needle.question)
            end = begin + len(needle.code)
            spans = enumerate(encoded.offset_mapping[row], len(questions))
            # a token may hold a part of the code and of what stands beside it
            code = [token for token, (first, behind) in spans if first < end and behind > begin]
            answers.append((code[0], code[-1] + 1))
            questions += encoded.input_ids[row]
        return cls(encode_all(tokenizer, [needle.fact for needle in asked]), questions, answers)

    def cap_questions(self, most: int) -> Retrieval:
        """Return the first `most` tokens of the questions, with the answers that are whole within them."""
        answers = [span for span in self.answers if span[1] <= most]
        return replace(self, questions=self.questions[:most], answers=answers)

    def count_fewest_tokens(self, start: int) -> int:
        """Return the length of the shortest prompt in which no fact overwrites another; `start` tokens precede all."""
        return start + len(self.questions) + (len(self.facts) + 1) * max(map(len, self.facts))

    def hide_in(self, text: Sequence[int], start: int) -> tuple[list[int], tuple[Span, ...]]:
        """Hide the facts in a text's token ids, evenly behind its first `start` tokens, and ask; see `ask_after`."""
        return self.ask_after(with_facts(text, self.facts, spread(len(self.facts), start, len(text))))

    def ask_after(self, text: Sequence[int]) -> tuple[list[int], tuple[Span, ...]]:
        """Return the token ids of a text that holds the facts and of the questions after it, and the answers' spans."""
        return [*text, *self.questions], tuple((len(text) + first, len(text) + end) for first, end in self.answers)


def hide_and_ask_within(
    tokenizer: Any, text: Sequence[int], asked: Sequence[Needle], rng: random.Random, start: int
) -> tuple[list[int], tuple[Span, ...]]:
    """Hide facts in a text's first half, and ask for each by itself in the second, in random order; see `hide_in`."""
    needles = [Retrieval.from_needles(tokenizer, [needle], rng) for needle in asked]
    half = (start + len(text)) // 2
    ids = with_facts(text, [needle.facts[0] for needle in needles], spread(len(needles), start, half))
    shuffled, positions = rng.sample(needles, len(needles)), spread(len(needles), half, len(text))
    ids = with_facts(ids, [needle.questions for needle in shuffled], positions)
    asked_at = zip(positions, shuffled, strict=True)
    spans = ((at + first, at + end) for at, needle in asked_at for first, end in needle.answers)
    return ids, tuple(span for span in spans if span[1] <= len(ids))


def count_needles(length: int) -> int:
    """Return the number of needles of a prompt of `length` tokens."""
    return min(MAX_NEEDLES, max(1, length // TOKENS_PER_NEEDLE))


def spread(count: int, start: int, end: int) -> list[int]:
    """Return `count` positions that cut a text from `start` to `end` into equal parts."""
    return [start + (index + 1) * (end - start) // (count + 1) for index in range(count)]


def with_facts(text: Sequence[int], facts: Sequence[Sequence[int]], positions: Sequence[int]) -> list[int]:
    """Return a text's token ids with each fact written over them at its position, cut to the text's length."""
    ids = list(text)
    for fact, position in zip(facts, positions, strict=True):
        ids[position : position + len(fact)] = fact
    return ids[: len(text)]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return a text's token ids, without the special tokens that a tokenizer may add."""
    return encode_all(tokenizer, [text])[0]


def encode_all(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of several texts at once: a tokenizer shares them out over the machine's cores."""
    if not texts:  # on which some tokenizers fail
        return []
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    ids: list[list[int]] = tokenizer(list(texts), **options).input_ids
    return ids


def get_start_tokens(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer puts before every text; those behind it, such as an end, are left out."""
    ids: list[int] = tokenizer("a").input_ids
    text = encode(tokenizer, "a")
    return ids[: next((at for at in range(len(ids)) if ids[at : at + len(text)] == text), 0)]
