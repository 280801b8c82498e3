"""What to evaluate, as one validated dataclass whose fields state every option of s2o-eval."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from calibrate.evaluation.settings import EXAMPLE, named
from calibrate.options import option, options_of, shared
from calibrate.prompts.retrieval import FACTS, MOST
from calibrate.recipe import OPTIONS as CALIBRATION
from s2o_runtime.errors import ConfigError
from s2o_runtime.fields import Rule

PROMPTS = "prompts"  # the task of the user's own file
RETRIEVAL = tuple(FACTS)
TEXT = ("perplexity", "agreement", "greedy")  # tasks that one pass over one prompt answers
TASKS = (*RETRIEVAL, *TEXT, "time")
DENSE = "dense"
SHORTEST = 64  # tokens
GROUPS = COMPARED, INPUT, OUTPUT = "what to compare", "on what", "output"


@dataclass(frozen=True)
class EvaluationPlan:
    """One evaluation: every field is an option of s2o-eval, which its `Option` describes.

    The fields `out`, `profiles`, `settings`, `samples` and `needles` are the options out_dir, profile, setting,
    num_prompts and num_needles. docs/options.md lists all of them.
    """

    model: str = shared(CALIBRATION["model"], group=COMPARED)
    out: Path = option(
        Rule(Path),
        "where results, report and pictures go",
        OUTPUT,
        name="out_dir",
        metavar="FOLDER",
        example="evaluations/demo",
    )
    lengths: tuple[int, ...] = shared(
        CALIBRATION["lengths"], rule=Rule(int, SHORTEST, unit="tokens", many=True), help="prompt lengths", group=INPUT
    )
    tasks: tuple[str, ...] = option(
        Rule(str, allowed=(*TASKS, PROMPTS), many=True),
        f"some of {', '.join(TASKS)}",
        INPUT,
        default=TASKS,
        metavar="NAME,NAME",
        default_text="all",
        example="needles,agreement",
    )
    profiles: tuple[Path, ...] = option(
        Rule(Path, many=True, empty=True),
        "a profile to compare with dense; may be given again",
        COMPARED,
        default=(),
        name="profile",
        repeatable=True,
    )
    settings: tuple[str, ...] = option(
        Rule(str, many=True, empty=True),
        f"one setting for all heads, such as {EXAMPLE} or pbs:keep=0.9; may be given again",
        COMPARED,
        default=(),
        name="setting",
        metavar="TEXT",
        repeatable=True,
    )
    prompts: tuple[Path, ...] | None = shared(
        CALIBRATION["prompts"],
        default=None,
        help='your prompts: files of JSON lines with prompt or messages, and "answer"; a task of their own',
        group=INPUT,
        default_text="none",
        plan_text="",
    )
    samples: int = option(
        Rule(int, low=1),
        "prompts of each length, for each task",
        INPUT,
        default=4,
        name="num_prompts",
    )
    needles: int = option(
        Rule(int, 1, MOST),
        "questions of each prompt that hides facts",
        INPUT,
        default=8,
        name="num_needles",
    )
    repeats: int = option(Rule(int, low=1), "timed prefills, after one that is not", INPUT, default=5)
    seed: int = shared(CALIBRATION["seed"], default=0, help="seed of prompts and random weights", group=INPUT)
    device: str = shared(CALIBRATION["device"], default="cpu", group=COMPARED)
    random_weights: bool = shared(CALIBRATION["random_weights"], default=False, group=COMPARED)
    tokenizer: str | None = shared(CALIBRATION["tokenizer"], default=None, group=COMPARED, plan_text="")
    trust_remote_code: bool = shared(CALIBRATION["trust_remote_code"], default=False, group=COMPARED)

    @property
    def loading(self) -> dict[str, Any]:
        """How the model and its tokenizer are read, as `model.models.load` and `load_tokenizer` take it."""
        return {name: getattr(self, name) for name in ("random_weights", "trust_remote_code", "tokenizer")}

    @property
    def journal_path(self) -> Path:
        return self.out / "results.sqlite"

    @property
    def variant_names(self) -> tuple[str, ...]:
        """What is compared, dense first: profiles by the shortest end of their paths that tells them apart."""
        return (DENSE, *_short_names(self.profiles), *(named(setting) for setting in self.settings))

    def validate(self) -> EvaluationPlan:
        """Returns itself. Raises ConfigError for an option out of its range, or for two that do not fit each other."""
        for entry in OPTIONS.values():
            entry.check(getattr(self, entry.field))
        if (PROMPTS in self.tasks) != (self.prompts is not None):
            raise ConfigError("the task 'prompts' and --prompts FILE.jsonl belong together: give both, or none")
        for profile in self.profiles:
            if not profile.is_file():
                raise ConfigError(f"profile {profile} is not a file: check the path")
        names = self.variant_names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"{twice} is given twice: give each profile and setting once")
        for path in self.prompts or ():
            if not path.is_file():
                raise ConfigError(f"prompt file {path} does not exist: check the path")
        return self

    def check_limit(self, limit: int) -> None:
        """Raises ConfigError if a length is beyond what the model can read."""
        if self.lengths[-1] > limit:
            raise ConfigError(f"length {self.lengths[-1]} is beyond the model's limit of {limit}: use a shorter one")

    def record(self) -> dict[str, Any]:
        """The plan as JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return plain


OPTIONS = options_of(EvaluationPlan, GROUPS)


def _short_names(paths: tuple[Path, ...]) -> list[str]:
    """Each path's shortest end, without its suffix, that no other path has."""
    ends = [path.with_suffix("").parts for path in paths]
    longest = max(map(len, ends), default=1)
    for count in range(1, longest + 1):
        names = ["/".join(parts[-count:]) for parts in ends]
        if len(set(names)) == len(names):
            break
    return names if ends else []
