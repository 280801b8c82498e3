"""Runs every prompt through every variant, dense first; what is in the journal is not measured again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from calibrate.evaluation import score
from calibrate.evaluation.plan import PROMPTS, RETRIEVAL, EvaluationPlan
from calibrate.evaluation.tasks import Case, build, cases
from calibrate.evaluation.variants import Variant, run_stats, running
from calibrate.journal import Journal
from calibrate.model.models import LoadedModel
from calibrate.progress import progress_bar
from calibrate.prompts.prompt import Prompt
from s2o_runtime.errors import ResourceError

POSITIONS = 512  # of a prompt at which predictions are compared with the dense model's


def evaluate(
    plan: EvaluationPlan,
    loaded: LoadedModel,
    compared: Sequence[Variant],
    user_prompts: Sequence[Prompt],
    journal: Journal,
    *,
    progress: bool,
) -> None:
    """Measure what a plan asks for. Afterwards the journal has an entry for each task, variant and prompt.

    Args:
        plan: what to measure.
        loaded: the model, unpatched.
        compared: the variants, dense first.
        user_prompts: the prompts of the user's own file.
        journal: where results are kept; what it has is not measured again.
        progress: whether to show a progress bar.

    Raises:
        InputError: If the GPU's memory does not suffice.
    """
    planned = cases(plan, user_prompts)
    with progress_bar("evaluating", len(planned) * len(compared), "prompt", shown=progress) as step:
        to_do = [[one for one in compared if _missing(case, one, compared[0], journal)] for case in planned]
        if stored := sum(len(compared) - len(missing) for missing in to_do):
            step(f"are in {journal.path.name}", stored, known=True)
        for case, missing in zip(planned, to_do, strict=True):
            if missing:
                prompt, asked = build(case, plan, loaded.tokenizer, user_prompts)
                run = _CaseRun(case, prompt, asked, plan, loaded, compared, journal)
                for _ in run.measure(missing):
                    step(f"{', '.join(case.tasks)} at {case.length} tokens")


def _missing(case: Case, variant: Variant, dense: Variant, journal: Journal) -> list[str]:
    """The tasks of a case that a variant still has to do. Dense always agrees with itself."""
    return [
        task
        for task in case.tasks
        if not (task == "agreement" and variant is dense) and journal.get(task, case.key(variant.identity)) is None
    ]


@dataclass(frozen=True)
class _CaseRun:
    """One prompt, the number of the question of each of its answers, and what it takes to run variants on it."""

    case: Case
    prompt: Prompt
    asked: Sequence[int]
    plan: EvaluationPlan
    loaded: LoadedModel
    compared: Sequence[Variant]
    journal: Journal

    def measure(self, missing: Sequence[Variant]) -> Iterator[None]:
        """Measure the variants that are missing in the journal, one at each step.

        Where a variant is to be compared with dense, dense runs too, whether or not it is missing.
        """
        dense = self.compared[0]
        dense_log_probs: Tensor | None = None
        compares = any("agreement" in _missing(self.case, variant, dense, self.journal) for variant in missing)
        for variant in self.compared:
            tasks = _missing(self.case, variant, dense, self.journal)
            is_reference = variant is dense and compares
            if not tasks and not is_reference:
                continue
            with _within_memory(variant, self.case):
                if self.case.tasks == ("time",):
                    results = self._times(variant)
                else:
                    results, dense_log_probs = self._scores(variant, tasks, is_reference, dense_log_probs)
            for task, result in results.items():
                self.journal.put(task, self.case.key(variant.identity), result)
            if variant in missing:
                yield

    def _times(self, variant: Variant) -> dict[str, Any]:
        with running(self.loaded.model, variant):
            result = score.first_token(self.loaded, self.prompt.ids, self.plan.repeats)
            return {"time": result | asdict(run_stats(variant))}

    def _scores(
        self, variant: Variant, tasks: Sequence[str], is_reference: bool, dense_log_probs: Tensor | None
    ) -> tuple[dict[str, Any], Tensor | None]:
        """The results of one pass by task, and the predictions that further variants are compared with.

        A greedy answer follows the variant's prompt, but is itself read with dense attention, as decoding always is.
        """
        with running(self.loaded.model, variant):
            forward = score.ForwardPass(self.loaded, self.prompt.ids, cache="greedy" in tasks)
            if is_reference:
                dense_log_probs = score.reference(forward, self._positions())
            results = {task: self._score(task, forward, dense_log_probs) for task in tasks if task != "greedy"}
            stats = asdict(run_stats(variant))
        if "greedy" in tasks:
            by_dense = self.journal.get("greedy", self.case.key(self.compared[0].identity))
            results["greedy"] = (
                score.greedy_answer(self.loaded, forward)
                if by_dense is None  # dense comes first
                else score.greedy_prefix(forward, by_dense["tokens"])
            )
        return {task: result | stats for task, result in results.items()}, dense_log_probs

    def _score(self, task: str, forward: score.ForwardPass, dense_log_probs: Tensor | None) -> dict[str, Any]:
        if task in (*RETRIEVAL, PROMPTS):
            return score.answers(forward, self.prompt) | {"asked": self.asked}
        if task == "perplexity":
            return score.negative_log_likelihood(forward)
        assert dense_log_probs is not None  # dense comes first
        return score.agreement(forward, self._positions(), dense_log_probs)

    def _positions(self) -> Tensor:
        """The positions [R] at which predictions are compared: equally many of each part of the prompt, by the seed."""
        rng = random.Random(f"{self.plan.seed}/{self.case.length}/{self.case.sample}/positions")
        parts = [range(first, last) for first, last in pairwise(score.bucket_edges(self.case.length))]
        chosen = [rng.sample(part, min(len(part), POSITIONS // score.BUCKETS)) for part in parts]
        return torch.tensor(sorted(position for part in chosen for position in part))


@contextmanager
def _within_memory(variant: Variant, case: Case) -> Iterator[None]:
    """Turn running out of GPU memory into an error that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"GPU memory ran out while {variant.name} read {case.length} tokens: use shorter --lengths or a smaller "
            "model; what was measured is kept"
        ) from error
