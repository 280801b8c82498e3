"""The prompts of an evaluation: which there are, and how each is built.

The retrieval tasks are of RULER's kinds. Every prompt has exactly the length it is meant to have: Python sources that
calibration does not use, facts written over them, and the questions with their answers at the end. A prompt depends on
the seed and on its task, length and number alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from calibrate.evaluation.plan import PROMPTS, RETRIEVAL, TEXT, EvaluationPlan
from calibrate.prompts.documents import first_tokens, sources
from calibrate.prompts.prompt import Prompt
from calibrate.prompts.retrieval import FACTS, Retrieval, encode, start_of
from s2o_runtime.errors import InputError

SUMMARY = "\n\n# What the sources above do, in a few sentences:\n#"  # ends held-out text: what follows is an answer


@dataclass(frozen=True)
class Case:
    """One prompt of an evaluation, before it is built.

    Args:
        tasks: what its result answers; several where one forward pass answers them all.
        length: in tokens.
        sample: its number among the prompts of this kind.
    """

    tasks: tuple[str, ...]
    length: int
    sample: int

    def key(self, variant: str) -> dict[str, Any]:
        """The journal's key of this prompt's result with a variant."""
        return {"variant": variant, "length": self.length, "sample": self.sample}


def cases(plan: EvaluationPlan, user_prompts: Sequence[Prompt]) -> list[Case]:
    """Every prompt that a plan asks for, by rising length; the user's prompts and the timed ones last."""
    groups = [*((task,) for task in RETRIEVAL), TEXT]  # one forward pass answers all tasks of a group
    groups = [tasks for group in groups if (tasks := tuple(task for task in group if task in plan.tasks))]
    planned = [Case(tasks, *rest) for *rest, tasks in product(plan.lengths, range(plan.samples), groups)]
    if PROMPTS in plan.tasks:
        planned += [Case((PROMPTS,), len(prompt.ids), index) for index, prompt in enumerate(user_prompts)]
    if "time" in plan.tasks:
        planned += [Case(("time",), length, 0) for length in plan.lengths]
    return planned


def build(case: Case, plan: EvaluationPlan, tokenizer: Any, user_prompts: Sequence[Prompt]) -> tuple[Prompt, list[int]]:
    """The prompt of a case, and for each of its answers the number of the question, which is that of its fact.

    Raises:
        InputError: If its length is too short for its facts and questions.
    """
    task = case.tasks[0]
    if task == PROMPTS:
        return user_prompts[case.sample], [0]
    text = first_tokens(tokenizer, sources(_rng(case, plan, "text")), case.length)
    if task not in RETRIEVAL:
        end = encode(tokenizer, SUMMARY) if task in TEXT else []
        return Prompt(torch.tensor(text[: case.length - len(end)] + end)), []
    begin = len(start_of(tokenizer))
    retrieval = _retrieval(case, plan, tokenizer)
    needed = retrieval.fewest_tokens(begin)
    if case.length < needed:
        raise InputError(_too_short(task, case.length, needed))
    ids, answers = retrieval.hidden_in(text[: case.length - len(retrieval.questions)], begin)
    return Prompt(torch.tensor(ids), answers), retrieval.asked


def check(plan: EvaluationPlan, tokenizer: Any) -> None:
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


def _retrieval(case: Case, plan: EvaluationPlan, tokenizer: Any) -> Retrieval:
    """The facts and questions of a case."""
    rng = _rng(case, plan, "facts")
    facts, asked = FACTS[case.tasks[0]](plan.needles, rng)
    return Retrieval.of(tokenizer, asked, rng, facts)


def _rng(case: Case, plan: EvaluationPlan, purpose: str) -> random.Random:
    return random.Random(f"{plan.seed}/{case.tasks[0]}/{case.length}/{case.sample}/{purpose}")


def _too_short(task: str, length: int, needed: int) -> str:
    return f"length {length} is too short for the task {task!r}: use {needed} tokens or more, or leave the task out"
