"""What to evaluate, as one validated dataclass."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from calibrate.evaluation.settings import named
from calibrate.needles import WORDS
from s2o_runtime.errors import ConfigError

PROMPTS = "prompts"  # the task of the user's own file
RETRIEVAL = ("needles", "multi", "variables")
TASKS = (*RETRIEVAL, "perplexity", "agreement", "time")
DENSE = "dense"
SHORTEST = 64  # tokens


@dataclass(frozen=True)
class Plan:
    """One evaluation.

    lengths: prompt lengths in tokens, ascending. tasks: some of `TASKS`, in that order, and `PROMPTS`.
    profiles, settings: what is compared with dense: files, and settings for all heads (`settings.py`).
    prompts: the user's JSON lines, with an answer each. depths: places of the needle, evenly spaced from the first
    token to the question. samples: prompts of each task, length and depth. needles: facts in a prompt of `multi`.
    repeats: timed prefills.
    """

    model: str
    out: Path
    lengths: tuple[int, ...]
    tasks: tuple[str, ...] = TASKS
    profiles: tuple[Path, ...] = ()
    settings: tuple[str, ...] = ()
    prompts: Path | None = None
    depths: int = 5
    samples: int = 4
    needles: int = 8
    repeats: int = 5
    seed: int = 0
    device: str = "cpu"
    random_weights: bool = False

    @property
    def journal_path(self) -> Path:
        return self.out / "results.jsonl"

    @property
    def depth_values(self) -> tuple[float, ...]:
        """Shares of the text before the needle, from 0 to 1."""
        return tuple(round(index / (self.depths - 1), 4) for index in range(self.depths)) if self.depths > 1 else (0.5,)

    @property
    def variant_names(self) -> tuple[str, ...]:
        """What is compared, dense first: profiles by the shortest end of their paths that tells them apart."""
        return (DENSE, *_short_names(self.profiles), *(named(setting) for setting in self.settings))

    def validate(self) -> Plan:
        known = (*TASKS, PROMPTS)
        for task in self.tasks:
            if task not in known:
                raise ConfigError(f"task {task!r} is not known: use some of {', '.join(known)}")
        if not self.tasks:
            raise ConfigError(f"no tasks are given: use some of {', '.join(known)}")
        if (PROMPTS in self.tasks) != (self.prompts is not None):
            raise ConfigError("the task 'prompts' and --prompts FILE.jsonl belong together: give both, or none")
        if not self.lengths or tuple(sorted(set(self.lengths))) != self.lengths:
            raise ConfigError(f"lengths {self.lengths} are not ascending numbers of tokens: give each once, sorted")
        if self.lengths[0] < SHORTEST:
            raise ConfigError(f"length {self.lengths[0]} is too short to look at by position: use {SHORTEST} or more")
        for name, least in (("depths", 1), ("samples", 1), ("needles", 1), ("repeats", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}: use at least {least}")
        if self.needles > len(WORDS):
            raise ConfigError(f"needles is {self.needles}: use at most {len(WORDS)}, one for each word there is")
        for profile in self.profiles:
            if not profile.is_file():
                raise ConfigError(f"profile {profile} is not a file: check the path")
        for setting in self.settings:
            named(setting)
        names = self.variant_names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"{twice} is given twice: give each profile and setting once")
        if self.prompts is not None and not self.prompts.is_file():
            raise ConfigError(f"prompt file {self.prompts} does not exist: check the path")
        return self

    def check_limit(self, limit: int) -> None:
        """Raises ConfigError if a length is beyond what the model can read."""
        if self.lengths[-1] > limit:
            raise ConfigError(f"length {self.lengths[-1]} is beyond the model's limit of {limit}: use a shorter one")

    def record(self) -> dict[str, Any]:
        """The plan as JSON."""
        plain = asdict(self) | {"depths": self.depth_values}
        return {name: _plain(value) for name, value in plain.items()}


def _short_names(paths: tuple[Path, ...]) -> list[str]:
    """Each path's shortest end, without its suffix, that no other path has."""
    ends = [path.with_suffix("").parts for path in paths]
    longest = max(map(len, ends), default=1)
    for count in range(1, longest + 1):
        names = ["/".join(parts[-count:]) for parts in ends]
        if len(set(names)) == len(names):
            break
    return names if ends else []


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
