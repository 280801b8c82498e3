"""Facts hidden in prompts and the questions that ask for them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import product
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


FAMILY = 4  # keys that differ in one character
HOPS = 2  # assignments between the one that states a chain's code and the last variable of the chain
MOST_NOTES = 5  # on a word that is counted
FIRST_NAMES, LAST_NAMES, CITIES, JOBS = map(read_texts("words").get, ("first_names", "last_names", "cities", "jobs"))

Facts = tuple[list[str], list[Needle]]  # the lines to hide, in their order, and what is asked


def _needles(count: int, rng: random.Random) -> Facts:
    """Codes of words."""
    return _stated(make_needles(count, rng))


def _alike(count: int, rng: random.Random) -> Facts:
    """Codes of keys in families that differ in one digit, so that each key has the others for distractors."""
    keys = []
    for word in rng.sample(WORDS, -(-count // FAMILY)):
        number, changed = random_code(rng), rng.randrange(DIGITS)
        keys += [
            f"{word}-{number[:changed]}{digit}{number[changed + 1 :]}" for digit in rng.sample("0123456789", FAMILY)
        ]
    return _stated([needle_of(key, random_code(rng)) for key in rng.sample(keys[:count], count)])


def _variables(count: int, rng: random.Random) -> Facts:
    """Chains of assignments, each name assigned before the one that refers to it; asked for is what refers."""
    chains = -(-count // HOPS)
    names = rng.sample(WORDS, chains * (HOPS + 1))
    codes = {name: random_code(rng) for name in names[:chains]}
    facts = [f"\n# VAR {name} = {code}.\n" for name, code in codes.items()]
    asked = []
    for hop in range(1, HOPS + 1):
        before, now = (names[first * chains : (first + 1) * chains] for first in (hop - 1, hop))
        for name, source in zip(now, rng.sample(before, chains), strict=True):
            codes[name] = codes[source]
            facts.append(f"\n# VAR {name} = VAR {source}.\n")
            asked.append(
                Needle(facts[-1], f"\n# What is the value of VAR {name}? The value of VAR {name} is ", codes[name])
            )
    return facts, asked[-count:]


def _counting(count: int, rng: random.Random) -> Facts:
    """How often a line occurs, up to `MOST_NOTES` times."""
    asked = []
    facts = []
    for word in rng.sample(WORDS, count):
        times, note = rng.randint(1, MOST_NOTES), f"\n# A note on {word}.\n"
        facts += [note] * times
        question = f"\n# How many notes on {word} are there? The number of notes on {word} is "
        asked.append(Needle(note, question, str(times)))
    return rng.sample(facts, len(facts)), asked


def _questions(count: int, rng: random.Random) -> Facts:
    """Sentences about people, asked for in other words: by turns a city, a profession or a name."""
    people = rng.sample(list(product(FIRST_NAMES, LAST_NAMES)), count)
    places = rng.sample(list(product(CITIES, JOBS)), count)
    asked = []
    for number, ((first, last), (city, job)) in enumerate(zip(people, places, strict=True)):
        name = f"{first} {last}"
        fact = f"\n# {name} moved to {city} to work as a {job}.\n"
        question, answer = (
            (f"In which city does {name} live now? {name} lives in", city),
            (f"What is the profession of {name}? {name} is a", job),
            (f"Who is the {job} in {city}? The {job} in {city} is", name),
        )[number % 3]
        asked.append(Needle(fact, f"\n# {question} ", answer))
    return _stated(asked)


def _stated(asked: list[Needle]) -> Facts:
    return [needle.fact for needle in asked], asked


FACTS: dict[str, Callable[[int, random.Random], Facts]] = {
    "needles": _needles,
    "alike": _alike,
    "variables": _variables,
    "counting": _counting,
    "questions": _questions,
}
MOST = 64  # questions of a prompt for which there are names


Span = tuple[int, int]  # the first token and the one behind the last
TOKENS_PER_NEEDLE = 1024
MAX_NEEDLES = 32


@dataclass(frozen=True)
class Retrieval:
    """What a retrieval prompt has besides its text, as token ids.

    facts: each fact, in the order in which they stand in the text. questions: the end of the prompt, where each
    question is followed by its answer. answers: where the codes stand among the tokens of `questions`. asked: which of
    the needles each answer belongs to.
    """

    facts: list[list[int]]
    questions: list[int]
    answers: list[Span]
    asked: list[int]

    @classmethod
    def of(
        cls, tokenizer: Any, asked: Sequence[Needle], rng: random.Random, facts: Sequence[str] | None = None
    ) -> Retrieval:
        """Tokenize needles, their questions in random order.

        Args:
            tokenizer: the model's tokenizer.
            asked: the needles that are asked for.
            rng: what draws the order of the questions: one `sample` of as many as there are needles.
            facts: what is written into the text; by default the needles' own facts, in their order.
        """
        questions: list[int] = []
        answers = []
        order = rng.sample(range(len(asked)), len(asked))
        for ids, (first, end) in _asked(tokenizer, [asked[number] for number in order]):
            answers.append((len(questions) + first, len(questions) + end))
            questions += ids
        texts = [needle.fact for needle in asked] if facts is None else facts
        return cls(encode_all(tokenizer, texts), questions, answers, order)

    def within(self, most: int) -> Retrieval:
        """The same with at most `most` tokens of questions, and the answers that are whole within them."""
        answers = [span for span in self.answers if span[1] <= most]
        return replace(self, questions=self.questions[:most], answers=answers, asked=self.asked[: len(answers)])

    def fewest_tokens(self, start: int) -> int:
        """The shortest prompt in which no fact is written over another. start: tokens that stand before all facts."""
        return start + len(self.questions) + (len(self.facts) + 1) * max(map(len, self.facts))

    def hidden_in(self, text: Sequence[int], start: int) -> tuple[list[int], tuple[Span, ...]]:
        """Hide the facts in a text, spread evenly, and ask for them at its end.

        Args:
            text: the text's token ids.
            start: how many of its first tokens may not be written over.

        Returns:
            The prompt's token ids, as many as text and questions have together, and where the codes that it asks for
            stand in it.
        """
        return self.asked_after(with_facts(text, self.facts, spread(len(self.facts), start, len(text))))

    def asked_after(self, text: Sequence[int]) -> tuple[list[int], tuple[Span, ...]]:
        """Ask for the facts after a text that holds them already; returns what `hidden_in` does."""
        return [*text, *self.questions], tuple((len(text) + first, len(text) + end) for first, end in self.answers)


def isolated_in(
    tokenizer: Any, text: Sequence[int], asked: Sequence[Needle], rng: random.Random, start: int
) -> tuple[list[int], tuple[Span, ...]]:
    """Hide facts in the first half of a text, and ask for each by itself in the second, in random order.

    Args:
        tokenizer, text, start: as for `Retrieval`.
        asked: the needles.
        rng: what draws the order.

    Returns:
        What `Retrieval.hidden_in` does.
    """
    single = [Retrieval.of(tokenizer, [needle], rng) for needle in asked]
    half = (start + len(text)) // 2
    ids = with_facts(text, [one.facts[0] for one in single], spread(len(single), start, half))
    shuffled, positions = rng.sample(single, len(single)), spread(len(single), half, len(text))
    answers = [(at + one.answers[0][0], at + one.answers[0][1]) for one, at in zip(shuffled, positions, strict=True)]
    ids = with_facts(ids, [one.questions for one in shuffled], positions)
    return ids, tuple(span for span in answers if span[1] <= len(ids))


def needles_in(length: int) -> int:
    """How many needles a prompt of so many tokens gets."""
    return min(MAX_NEEDLES, max(1, length // TOKENS_PER_NEEDLE))


def spread(count: int, start: int, end: int) -> list[int]:
    """`count` positions that cut a text from `start` to `end` into equal parts."""
    return [start + (index + 1) * (end - start) // (count + 1) for index in range(count)]


def with_facts(text: Sequence[int], facts: Sequence[Sequence[int]], positions: Sequence[int]) -> list[int]:
    """The text's token ids with each fact written over them at its position; what goes beyond the end is cut off."""
    ids = list(text)
    for fact, position in zip(facts, positions, strict=True):
        ids[position : position + len(fact)] = fact
    return ids[: len(text)]


def _asked(tokenizer: Any, needles: Sequence[Needle]) -> list[tuple[list[int], Span]]:
    """Each needle's question and answer as token ids, and which of these hold a digit of its code."""
    if not needles:
        return []
    texts = [needle.question + needle.answer for needle in needles]
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False)
    asked = []
    for needle, ids, characters in zip(needles, encoded.input_ids, encoded.offset_mapping, strict=True):
        begin, end = len(needle.question), len(needle.question) + len(needle.code)
        digits = [index for index, (first, behind) in enumerate(characters) if first < end and behind > begin]
        asked.append((ids, (digits[0], digits[-1] + 1)))
    return asked


def encode(tokenizer: Any, text: str) -> list[int]:
    """A text's token ids, without the special tokens that a tokenizer may add."""
    return encode_all(tokenizer, [text])[0]


def encode_all(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of several texts, as `encode` gives them; a tokenizer shares them out over the machine's cores."""
    if not texts:
        return []
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    ids: list[list[int]] = tokenizer(list(texts), **options).input_ids
    return ids


def start_of(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer puts before every text; what it puts behind, such as an end, is left out."""
    ids: list[int] = tokenizer("a").input_ids
    text = encode(tokenizer, "a")
    return ids[: next((at for at in range(len(ids)) if ids[at : at + len(text)] == text), 0)]
