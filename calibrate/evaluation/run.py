"""Every prompt through every variant, dense first; what is in the journal is not measured again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from calibrate.evaluation import score
from calibrate.evaluation.plan import PROMPTS, RETRIEVAL, Plan
from calibrate.evaluation.tasks import Asked, Case, build, cases
from calibrate.evaluation.variants import Variant, ran, running
from calibrate.journal import Journal
from calibrate.models import LoadedModel
from s2o_runtime.errors import InputError

POSITIONS = 512  # of a prompt at which predictions are compared with the dense model's


def evaluate(
    plan: Plan,
    loaded: LoadedModel,
    compared: Sequence[Variant],
    own: Sequence[Asked],
    journal: Journal,
    progress: bool,
) -> None:
    """Measure what the plan asks for. The journal has an entry for each task, variant and prompt afterwards.

    compared: the variants, dense first. own: the user's prompts.
    """
    every = cases(plan, own)
    with tqdm(total=len(every) * len(compared), desc="evaluating", unit="prompt", disable=not progress) as bar:
        for case in every:
            missing = [variant for variant in compared if _missing(case, variant, compared[0], journal)]
            bar.update(len(compared) - len(missing))
            if missing:
                bar.set_postfix_str(f"{', '.join(case.tasks)} at {case.length} tokens", refresh=False)
                asked = build(case, plan, loaded.tokenizer, own)
                for _ in _measured(case, asked, plan, loaded, compared, missing, journal):
                    bar.update()


def _missing(case: Case, variant: Variant, dense: Variant, journal: Journal) -> list[str]:
    """The tasks of a case that a variant still has to do. Dense always agrees with itself."""
    return [
        task
        for task in case.tasks
        if not (task == "agreement" and variant is dense) and journal.get(task, case.key(variant.identity)) is None
    ]


def _measured(
    case: Case,
    asked: Asked,
    plan: Plan,
    loaded: LoadedModel,
    compared: Sequence[Variant],
    missing: Sequence[Variant],
    journal: Journal,
) -> Iterator[None]:
    """Measure the variants that are missing, one at each step."""
    dense = compared[0]
    positions = _positions(case, plan)
    kept: Tensor | None = None
    compares = any("agreement" in _missing(case, variant, dense, journal) for variant in missing)
    for variant in compared:
        tasks = _missing(case, variant, dense, journal)
        reads_for_others = variant is dense and compares
        if not tasks and not reads_for_others:
            continue
        with _within_memory(variant, case), running(loaded.model, variant):
            found: dict[str, dict[str, Any]] = {}
            if case.tasks == ("time",):
                found["time"] = score.first_token(loaded, asked.ids, plan.repeats)
            else:
                reading = score.Reading(loaded, asked.ids)
                if reads_for_others:
                    kept = score.reference(reading, positions)
                found = {task: _scored(task, reading, asked, positions, kept) for task in tasks}
                del reading
            did = asdict(ran(variant))
        for task, value in found.items():
            journal.put(task, case.key(variant.identity), value | did)
        if variant in missing:
            yield


def _scored(
    task: str, reading: score.Reading, asked: Asked, positions: Tensor, dense: Tensor | None
) -> dict[str, Any]:  # fmt: skip
    if task in (*RETRIEVAL, PROMPTS):
        return score.answers(reading, asked)
    if task == "perplexity":
        return score.surprise(reading)
    assert dense is not None  # dense comes first
    return score.agreement(reading, positions, dense)


def _positions(case: Case, plan: Plan) -> Tensor:
    """The positions [R] at which predictions are compared: as many of each part of the prompt, by the seed."""
    rng = random.Random(f"{plan.seed}/{case.length}/{case.sample}/positions")
    edges = score.bucket_edges(case.length)
    parts = [range(first, last) for first, last in pairwise(edges)]
    chosen = [rng.sample(part, min(len(part), POSITIONS // score.BUCKETS)) for part in parts]
    return torch.tensor(sorted(place for part in chosen for place in part))


@contextmanager
def _within_memory(variant: Variant, case: Case) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"GPU memory ran out while {variant.name} read {case.length} tokens: use shorter --lengths or a smaller "
            "model; what was measured is kept"
        ) from error
