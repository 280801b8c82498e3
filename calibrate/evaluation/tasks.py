"""The prompts: which there are, and how each is made. In RULER's manner, in the wording of `calibrate.needles`.

Every prompt has exactly the length it is meant to have: Python sources that calibration does not use, facts written
over them, and the questions with their answers at the end. A prompt depends on the seed and its own place alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from calibrate.evaluation.plan import PROMPTS, RETRIEVAL, Plan
from calibrate.needles import Needle, make_needles
from calibrate.prompts import code_tokens, encode, sources
from s2o_runtime.errors import InputError

TEXT = ("perplexity", "agreement")  # tasks that one pass over one prompt answers
CHAINS = 4  # of variables in a prompt: a model that repeats any code it has seen is right once in four times
HOPS = 2  # names between a chain's code and the variable that is asked for


@dataclass(frozen=True)
class Case:
    """One prompt: its tasks, its length in tokens, its number, and where its needle is if it has one."""

    tasks: tuple[str, ...]
    length: int
    sample: int
    depth: float | None = None

    def key(self, variant: str) -> dict[str, Any]:
        """What a result of a variant is kept under."""
        return {"variant": variant, "length": self.length, "depth": self.depth, "sample": self.sample}


@dataclass(frozen=True)
class Asked:
    """A prompt's token ids [L], and where the answers stand in it, as (first token, one behind the last)."""

    ids: Tensor
    answers: tuple[tuple[int, int], ...] = ()


def cases(plan: Plan, own: Sequence[Asked]) -> list[Case]:
    """Everything a plan asks for, short prompts first. own: the user's prompts."""
    found = []
    for length in plan.lengths:
        if "needles" in plan.tasks:
            places = product(plan.depth_values, range(plan.samples))
            found += [Case(("needles",), length, sample, depth) for depth, sample in places]
        for task in ("multi", "variables"):
            if task in plan.tasks:
                found += [Case((task,), length, sample) for sample in range(plan.samples)]
        if of_text := tuple(task for task in TEXT if task in plan.tasks):
            found += [Case(of_text, length, sample) for sample in range(plan.samples)]
    if PROMPTS in plan.tasks:
        found += [Case((PROMPTS,), len(asked.ids), index) for index, asked in enumerate(own)]
    if "time" in plan.tasks:
        found += [Case(("time",), length, 0) for length in plan.lengths]
    return found


def build(case: Case, plan: Plan, tokenizer: Any, own: Sequence[Asked]) -> Asked:
    """The prompt of a case. Raises InputError if it is too short for what is asked."""
    task = case.tasks[0]
    if task == PROMPTS:
        return own[case.sample]
    begin = start_of(tokenizer)
    if task not in RETRIEVAL:
        return Asked(torch.tensor(begin + _haystack(tokenizer, case, plan, case.length - len(begin))))
    parts = _parts(case, plan, tokenizer)
    needed = parts.least(len(begin))
    if case.length < needed:
        raise InputError(_too_short(task, case.length, needed))
    ids = begin + _haystack(tokenizer, case, plan, case.length - len(begin) - len(parts.end))
    for fact, place in zip(parts.facts, parts.places(case.depth, len(begin), len(ids)), strict=True):
        ids[place : place + len(fact)] = fact
    answers = tuple((len(ids) + first, len(ids) + last) for first, last in parts.answers)
    return Asked(torch.tensor(ids + parts.end), answers)


def check(plan: Plan, tokenizer: Any) -> None:
    """Raises InputError if the shortest length is too short for a task, whichever of its prompts needs the most."""
    begin = len(start_of(tokenizer))
    needed: dict[str, int] = {}
    for case in cases(plan, ()):
        task = case.tasks[0]
        if task in RETRIEVAL and case.length == plan.lengths[0]:
            needed[task] = max(needed.get(task, 0), _parts(case, plan, tokenizer).least(begin))
    for task, least in needed.items():
        if plan.lengths[0] < least:
            raise InputError(_too_short(task, plan.lengths[0], least))


def start_of(tokenizer: Any) -> list[int]:
    """The token that a tokenizer puts before every text, if it does."""
    first = tokenizer.bos_token_id
    return [first] if first is not None and tokenizer("a").input_ids[:1] == [first] else []


@dataclass(frozen=True)
class _Parts:
    """What is written over the text: facts in their order, the end of the prompt, and the answers' places in it."""

    facts: list[list[int]]
    end: list[int]
    answers: list[tuple[int, int]]

    def least(self, begin: int) -> int:
        """The fewest tokens in which no fact is written over another."""
        return begin + len(self.end) + (len(self.facts) + 1) * max(map(len, self.facts))

    def places(self, depth: float | None, begin: int, end: int) -> list[int]:
        """Where the facts start between two positions: one at its depth, several evenly spread."""
        if depth is not None:
            return [begin + round(depth * (end - begin - len(self.facts[0])))]
        return [begin + (index + 1) * (end - begin) // (len(self.facts) + 1) for index in range(len(self.facts))]


def _parts(case: Case, plan: Plan, tokenizer: Any) -> _Parts:
    rng = _rng(case, plan)
    task = case.tasks[0]
    if task == "variables":
        facts, asked = _chains(rng)
    else:
        asked = make_needles(1 if task == "needles" else plan.needles, rng)
        facts = [needle.fact for needle in asked]
    end: list[int] = []
    answers = []
    for needle in rng.sample(asked, len(asked)):
        first, last = code_tokens(tokenizer, needle)
        answers.append((len(end) + first, len(end) + last))
        end += encode(tokenizer, needle.question + needle.answer)
    return _Parts([encode(tokenizer, fact) for fact in facts], end, answers)


def _chains(rng: random.Random) -> tuple[list[str], list[Needle]]:
    """Facts of chains, each name stated before the one that refers to it, and the last name of each with its code."""
    named = make_needles(CHAINS * (HOPS + 1), rng)
    facts = [needle.fact for needle in named[:CHAINS]]
    asked = named[:CHAINS]
    for hop in range(1, HOPS + 1):
        words = [needle.word for needle in named[hop * CHAINS : (hop + 1) * CHAINS]]
        facts += [
            f"\n# The secret code for {word} is the secret code for {before.word}.\n"
            for word, before in rng.sample(list(zip(words, asked, strict=True)), CHAINS)
        ]
        asked = [Needle(word, before.code) for word, before in zip(words, asked, strict=True)]
    return facts, asked


def _haystack(tokenizer: Any, case: Case, plan: Plan, count: int) -> list[int]:
    """`count` tokens of sources that no calibration has seen; the same for all depths of a needle."""
    texts = _texts()
    first = random.Random(f"{plan.seed}/{case.length}/{case.sample}/text").randrange(len(texts))
    ids: list[int] = []
    for text in texts[first:] + texts[:first]:
        ids += encode(tokenizer, text)
        if len(ids) >= count:
            return ids[:count]
    raise InputError(f"the standard library's sources are too short for {count} tokens: use shorter --lengths")


@lru_cache(maxsize=1)
def _texts() -> list[str]:
    """The standard library's files that are held out, each folder's together."""
    return list(sources(random.Random(0), True))


def _rng(case: Case, plan: Plan) -> random.Random:
    return random.Random(f"{plan.seed}/{case.tasks[0]}/{case.length}/{case.sample}/{case.depth}")


def _too_short(task: str, length: int, needed: int) -> str:
    return f"length {length} is too short for the task {task!r}: use {needed} tokens or more, or leave the task out"
