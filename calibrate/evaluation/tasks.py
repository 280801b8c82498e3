"""Prompts of an evaluation: the built-in tasks and the user's own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from calibrate.evaluation import ruler
from calibrate.evaluation.plan import AGREEMENT, PROMPTS, RETRIEVAL, RULER, TIME, EvaluationPlan
from calibrate.prompts.documents import (
    check_text,
    hide_in_documents,
    make_document,
    parse_entries,
    shuffle_held_out_sources,
    take_first_tokens,
)
from calibrate.prompts.prompt import Prompt
from calibrate.prompts.prompts import encode_served
from calibrate.prompts.retrieval import FACTS, Retrieval, encode, get_start_tokens
from s2o_runtime.errors import InputError

AnyPrompt = Prompt | ruler.RulerQuestion
EXPECTED = 'expected an object with "prompt" (or chat "messages") and "answer", both texts that are not empty'


@dataclass(frozen=True)
class Case:
    """One prompt of an evaluation, before it is built: its length in tokens and its number among its task's."""

    task: str
    length: int
    sample: int

    def key(self, variant: str) -> dict[str, Any]:
        """Return the journal's key of this prompt's result with a variant."""
        return {"variant": variant, "length": self.length, "sample": self.sample}

    def rng(self, plan: EvaluationPlan, purpose: str) -> random.Random:
        """Return the random numbers of one purpose for this prompt."""
        return random.Random(f"{plan.seed}/{self.task}/{self.length}/{self.sample}/{purpose}")


def list_cases(plan: EvaluationPlan, user_prompts: Sequence[Prompt]) -> list[Case]:
    """List every prompt of a plan, by rising length; the user's come last."""
    counts = {task: plan.samples for task in (*RETRIEVAL, AGREEMENT) if task in plan.tasks}
    if RULER in plan.tasks:
        counts |= dict.fromkeys(ruler.TASKS, plan.ruler_prompts)
    if TIME in plan.tasks:
        counts[TIME] = 1
    planned = [
        Case(task, length, sample)
        for length, (task, count) in product(plan.lengths, counts.items())
        for sample in range(count)
    ]
    if PROMPTS in plan.tasks:
        planned += [Case(PROMPTS, len(prompt.ids), index) for index, prompt in enumerate(user_prompts)]
    return planned


def build(case: Case, plan: EvaluationPlan, tokenizer: Any, user_prompts: Sequence[Prompt]) -> AnyPrompt:
    """Build the prompt of a case; with a task of RULER, its question."""
    if case.task == PROMPTS:
        return user_prompts[case.sample]
    if case.task in ruler.TASKS:
        count = plan.ruler_prompts
        return ruler.make_question(tokenizer, case.task, case.length, case.sample, count=count, seed=plan.seed)
    sources = shuffle_held_out_sources(case.rng(plan, "text"))
    if case.task in RETRIEVAL:
        return hide_in_documents(tokenizer, sources, case.length, _hide_facts(case, plan, tokenizer), "")
    return Prompt(torch.tensor(take_first_tokens(tokenizer, sources, case.length)))


def check_lengths(plan: EvaluationPlan, tokenizer: Any) -> None:
    """Raise InputError if the shortest length is too short for a prompt of a task, or what makes one is missing."""
    shortest = plan.lengths[0]
    for task in ruler.TASKS if RULER in plan.tasks else ():
        build(Case(task, shortest, 0), plan, tokenizer, ())
    begin = len(get_start_tokens(tokenizer))
    for task in (task for task in RETRIEVAL if task in plan.tasks):
        samples = (Case(task, shortest, sample) for sample in range(plan.samples))
        needed = max(_hide_facts(case, plan, tokenizer).count_fewest_tokens(begin) for case in samples)
        if shortest < needed:
            raise InputError(
                f"length {shortest} is too short for the task {task!r}: use {needed} tokens or more, or leave the task "
                "out"
            )


def _hide_facts(case: Case, plan: EvaluationPlan, tokenizer: Any) -> Retrieval:
    rng = case.rng(plan, "facts")
    return Retrieval.from_needles(tokenizer, FACTS[case.task](plan.needles, rng), rng)


def read_user_prompts(paths: Sequence[Path], tokenizer: Any, limit: int) -> list[Prompt]:
    """Read prompts with their answers behind them, up to the model's `limit` of tokens.

    Raises InputError with file and line for a prompt that cannot be read, is empty or too long.
    """

    def read(entry: Any, location: str) -> Prompt:
        answer = entry.pop("answer", None) if isinstance(entry, dict) else None
        if not isinstance(answer, str):
            raise ValueError(EXPECTED)
        before = encode_served(tokenizer, make_document(entry, "", "", EXPECTED))
        after = encode(tokenizer, check_text(answer))
        tokens = len(before + after)
        if not before or not after:  # a tokenizer may drop what it does not know
            raise ValueError(EXPECTED)
        if tokens > limit:
            raise ValueError(
                f"prompt and answer are {tokens} tokens, beyond the model's limit of {limit}: shorten them"
            )
        return Prompt(torch.tensor(before + after), ((len(before), tokens),))

    return [prompt for path in paths for prompt in parse_entries(path, read, EXPECTED)]
