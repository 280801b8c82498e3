"""What retrieval prompts hide and ask for, of RULER's kinds: the facts and the questions of each task."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

from calibrate.prompts.needles import DIGITS, WORDS, Needle, make_needles, needle_of, random_code, read_texts

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
