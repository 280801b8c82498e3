"""The prompts of an evaluation: which there are, and how each is built.

The tasks are of RULER's kinds, in the wording of `calibrate.prompts.needles`. Every prompt has exactly the length it is
meant to have: Python sources that calibration does not use, facts written over them, and the questions with their
answers at the end. A prompt depends on the seed and on its task, length, depth and number alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch

from calibrate.evaluation.plan import PROMPTS, RETRIEVAL, Plan
from calibrate.prompts.needles import Needle, make_needles
from calibrate.prompts.prompt import Prompt
from calibrate.prompts.retrieval import Retrieval, encode, start_of
from calibrate.prompts.stdlib import sources
from s2o_runtime.errors import InputError

TEXT = ("perplexity", "agreement")  # tasks that one pass over one prompt answers
CHAINS = 4  # of variables in a prompt: a model that repeats any code it has seen is right once in four times
HOPS = 2  # names between a chain's code and the variable that is asked for


@dataclass(frozen=True)
class Case:
    """One prompt of an evaluation, before it is built.

    Args:
        tasks: What its result answers; several where one forward pass answers them all.
        length: In tokens.
        sample: Its number among the prompts of this kind.
        depth: The share of the text before its needle, 0 to 1; None for a prompt without a single needle.
    """

    tasks: tuple[str, ...]
    length: int
    sample: int
    depth: float | None = None

    def key(self, variant: str) -> dict[str, Any]:
        """The journal's key of this prompt's result with a variant."""
        return {"variant": variant, "length": self.length, "depth": self.depth, "sample": self.sample}


def cases(plan: Plan, user_prompts: Sequence[Prompt]) -> list[Case]:
    """Every prompt that a plan asks for, by rising length; the user's prompts and the timed ones last."""
    planned = []
    for length in plan.lengths:
        if "needles" in plan.tasks:
            depths_and_samples = product(plan.depth_values, range(plan.samples))
            planned += [Case(("needles",), length, sample, depth) for depth, sample in depths_and_samples]
        for task in ("multi", "variables"):
            if task in plan.tasks:
                planned += [Case((task,), length, sample) for sample in range(plan.samples)]
        if text_tasks := tuple(task for task in TEXT if task in plan.tasks):
            planned += [Case(text_tasks, length, sample) for sample in range(plan.samples)]
    if PROMPTS in plan.tasks:
        planned += [Case((PROMPTS,), len(prompt.ids), index) for index, prompt in enumerate(user_prompts)]
    if "time" in plan.tasks:
        planned += [Case(("time",), length, 0) for length in plan.lengths]
    return planned


def build(case: Case, plan: Plan, tokenizer: Any, user_prompts: Sequence[Prompt]) -> Prompt:
    """The prompt of a case.

    Raises:
        InputError: If its length is too short for its facts and questions.
    """
    task = case.tasks[0]
    if task == PROMPTS:
        return user_prompts[case.sample]
    begin = start_of(tokenizer)
    if task not in RETRIEVAL:
        return Prompt(torch.tensor(begin + _haystack(tokenizer, case, plan, case.length - len(begin))))
    retrieval = _retrieval(case, plan, tokenizer)
    needed = retrieval.fewest_tokens(len(begin))
    if case.length < needed:
        raise InputError(_too_short(task, case.length, needed))
    text = begin + _haystack(tokenizer, case, plan, case.length - len(begin) - len(retrieval.questions))
    ids, answers = retrieval.hidden_in(text, retrieval.positions(len(begin), len(text), case.depth))
    return Prompt(torch.tensor(ids), answers)


def check(plan: Plan, tokenizer: Any) -> None:
    """Check that the shortest length is long enough for every prompt of every task.

    Raises:
        InputError: If it is not.
    """
    begin = len(start_of(tokenizer))
    needed: dict[str, int] = {}
    for case in cases(plan, ()):
        task = case.tasks[0]
        if task in RETRIEVAL and case.length == plan.lengths[0]:
            needed[task] = max(needed.get(task, 0), _retrieval(case, plan, tokenizer).fewest_tokens(begin))
    for task, least in needed.items():
        if plan.lengths[0] < least:
            raise InputError(_too_short(task, plan.lengths[0], least))


def _retrieval(case: Case, plan: Plan, tokenizer: Any) -> Retrieval:
    """The facts and questions of a case."""
    rng = _rng(case, plan)
    task = case.tasks[0]
    if task == "variables":
        facts, asked = _chains(rng)
        return Retrieval.of(tokenizer, asked, rng, facts)
    return Retrieval.of(tokenizer, make_needles(1 if task == "needles" else plan.needles, rng), rng)


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
