"""What the errors of layers and heads cost in KL: measured once for a calibration, and kept in its journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from calibrate.journal import Journal
from calibrate.model.models import LoadedModel
from calibrate.model.sensitivity import Sensitivity, sensitivity
from calibrate.prompts.prompt import Prompt
from calibrate.recipe import Recipe
from calibrate.work.executor import Executor, WorkerState, WorkItem, executor_of, measured

KIND = "sensitivity"  # of entries in the journal
PROMPTS = 4  # one of each kind of the built-in text; single prompts differ by a factor of two to three
TOKENS = 2048  # of each, its first ones: a backward pass needs memory


def measured_sensitivity(
    model: LoadedModel | Executor, prompts: Mapping[int, Sequence[Prompt]], recipe: Recipe, journal: Journal
) -> Sensitivity:
    """The sensitivity of every layer and head, from the journal if it is there.

    Args:
        model: who runs it, or a loaded model, which then runs in this process.
        prompts: calibration prompts by length. Those of the longest length of at most `TOKENS` are used, or the
            beginnings of the shortest ones.
        recipe: says the seed.
        journal: where it is kept.

    Raises:
        ModelError: inf or NaN came up in the model.
        ResourceError: The GPU's memory ran out, or the journal cannot be written.
    """
    length = max((length for length in prompts if length <= TOKENS), default=min(prompts))
    chosen = prompts[length][:PROMPTS]
    item = PromptsSensitivity(tuple(prompt.sha256 for prompt in chosen), min(length, TOKENS), recipe.seed)
    with executor_of(model) as executor:
        executor.register_prompts(chosen)
        return _typed(measured([item], executor, journal)[0])


@dataclass(frozen=True)
class PromptsSensitivity(WorkItem):
    """The sensitivity of every layer and head on the first tokens of some prompts, as an item of work."""

    prompts: tuple[str, ...]
    tokens: int
    seed: int
    stage: str = "sensitivity"
    kind: ClassVar[str] = KIND

    @property
    def key(self) -> dict[str, Any]:
        return {"prompts": list(self.prompts), "tokens": self.tokens, "seed": self.seed}

    def __str__(self) -> str:
        return "sensitivity of all layers"

    def run(self, worker: WorkerState) -> Sensitivity:
        return sensitivity(
            worker.loaded, [worker.prompts[prompt].ids[: self.tokens] for prompt in self.prompts], self.seed
        )


def stored_sensitivity(
    entries: Sequence[tuple[Mapping[str, Any], Any]], prompts: set[str | None]
) -> Sensitivity | None:
    """The sensitivity last measured on some of these prompts; None without one.

    Args:
        entries: of this kind in a journal.
        prompts: the hashes of the prompts that a profile was calibrated on.
    """
    for key, value in reversed(entries):
        if set(key["prompts"]) <= prompts:
            return _typed(value)
    return None


def _typed(value: Any) -> Sensitivity:
    return tuple(tuple(float(head) for head in layer) for layer in value)
