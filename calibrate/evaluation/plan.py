"""Options of an evaluation, and the settings that it compares."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.options import collect_options, option, shared
from calibrate.prompts.retrieval import FACTS, MAX_QUESTIONS
from calibrate.recipe import MAX_COUNT
from calibrate.recipe import OPTIONS as CALIBRATION
from s2o_runtime.config import LayerConfig, StopRule, TileConfig
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.fields import TOKENS, Rule
from s2o_runtime.lengths import MAX_LENGTH

if TYPE_CHECKING:
    from scripts.bench.baselines.settings import Baseline

PROMPTS = "prompts"  # the task of the user's own file
RULER = "ruler"  # tasks that need lm_eval
RETRIEVAL = tuple(FACTS)
AGREEMENT, TIME = "agreement", "time"
TASKS = (*RETRIEVAL, AGREEMENT, TIME)
ALL_TASKS = (*TASKS, RULER, PROMPTS)  # in the order in which they are done
DENSE = "dense"
FILES = ("report.md", "summary.json")  # of a report, in its folder
SHORTEST = 64  # tokens
RULER_ROWS = 500  # prompts that lm_eval makes of each of RULER's tasks
GROUPS = COMPARED, INPUT, OUTPUT = "what to compare", "on what", "output"
# the options of LayerConfig.uniform that a text may give, in the order in which a setting is named; that checks ranges
RULES = {
    "tau": Rule(float),
    "segment": Rule(int),
    "representatives": Rule(int),
    "stop_rule": Rule(str),
    "last_rows": Rule(int),
    "tail": Rule(str),
}
EXAMPLE = "tau=0.3,segment=1024,representatives=16,tail=mean"
BASELINES = ("flash-prefill", "flash-prefill-v2", "flex-prefill", "pbs", "sparge", "xattention")
REPOSITORY = Path(__file__).resolve().parents[2]  # of a clone
CPU_TILE = TileConfig(block_m=64, block_n=64, chunk=4)  # its rows divide every legal segment


@dataclass(frozen=True)
class EvaluationPlan:
    """One evaluation: every field is an option of s2o-eval, which its `Option` describes.

    The fields `out`, `profiles`, `settings`, `samples`, `needles` and `ruler_prompts` are the options out_dir, profile,
    setting, num_prompts, num_needles and num_ruler. docs/options.md lists all of them.
    """

    # fmt: off
    model: str = shared(CALIBRATION["model"], group=COMPARED)
    out: Path = option(
        Rule(Path), "where results and report go", OUTPUT,
        name="out_dir", metavar="FOLDER", example="evaluations/demo")
    lengths: tuple[int, ...] = shared(
        CALIBRATION["lengths"], rule=Rule(int, SHORTEST, MAX_LENGTH, unit=TOKENS, many=True), help="prompt lengths",
        group=INPUT)
    tasks: tuple[str, ...] = option(
        Rule(str, allowed=ALL_TASKS, many=True), f"some of {', '.join((*TASKS, RULER))}", INPUT,
        default=TASKS, metavar="NAME,NAME", default_text="all but ruler", example="needles,agreement")
    profiles: tuple[Path, ...] = option(
        Rule(Path, many=True, empty=True), "a profile to compare with dense; may be given again", COMPARED,
        default=(), name="profile", repeatable=True)
    settings: tuple[str, ...] = option(
        Rule(str, many=True, empty=True),
        f"one setting for all heads, such as {EXAMPLE} or pbs:keep=0.9; may be given again", COMPARED,
        default=(), name="setting", metavar="TEXT", repeatable=True)
    prompts: tuple[Path, ...] | None = shared(
        CALIBRATION["prompts"], default=None, group=INPUT, default_text="none", plan_text="",
        help='your prompts: files of JSON lines with prompt or messages, and "answer"; a task of their own')
    samples: int = option(
        Rule(int, 1, MAX_COUNT), "prompts of each length, for each task", INPUT, default=4, name="num_prompts")
    needles: int = option(
        Rule(int, 1, MAX_QUESTIONS), "questions of each prompt that hides facts", INPUT, default=8, name="num_needles")
    ruler_prompts: int = option(
        Rule(int, 1, RULER_ROWS), "prompts of each length, for each task of ruler", INPUT, default=100,
        name="num_ruler")
    repeats: int = option(Rule(int, 1, MAX_COUNT), "timed prefills, after one that is not", INPUT, default=5)
    seed: int = shared(CALIBRATION["seed"], default=0, help="seed of prompts and random weights", group=INPUT)
    device: str = shared(CALIBRATION["device"], default="cpu", group=COMPARED)
    random_weights: bool = shared(CALIBRATION["random_weights"], default=False, group=COMPARED)
    tokenizer: str | None = shared(CALIBRATION["tokenizer"], default=None, group=COMPARED, plan_text="")
    trust_remote_code: bool = shared(CALIBRATION["trust_remote_code"], default=False, group=COMPARED)
    # fmt: on

    @property
    def loading(self) -> dict[str, Any]:
        """The options of `model.models.load` and `load_tokenizer`."""
        return {name: getattr(self, name) for name in ("random_weights", "trust_remote_code", "tokenizer")}

    @property
    def journal_path(self) -> Path:
        """The file that keeps the results."""
        return self.out / "results.sqlite"

    @property
    def variant_names(self) -> tuple[str, ...]:
        """The names of what is compared, dense first: a profile's is the shortest end of its path that no other has."""
        return (DENSE, *_label_paths(self.profiles), *(normalise_setting(setting) for setting in self.settings))

    def validate(self) -> EvaluationPlan:
        """Return the plan itself. Raises ConfigError for an option out of its range, or two that do not fit."""
        for entry in OPTIONS.values():
            entry.check(getattr(self, entry.field))
        if (PROMPTS in self.tasks) != (self.prompts is not None):
            raise ConfigError("the task 'prompts' and --prompts FILE.jsonl belong together: give both, or none")
        for profile in self.profiles:
            if not profile.is_file():
                raise ConfigError(f"profile {profile} is not a file: check the path")
        names = self.variant_names
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"{twice[0]} is given twice: give each profile and setting once")
        for path in self.prompts or ():
            if not path.is_file():
                raise ConfigError(f"prompt file {path} does not exist: check the path")
        return self


OPTIONS = collect_options(EvaluationPlan, GROUPS)


def _label_paths(paths: tuple[Path, ...]) -> list[str]:
    """Return each path's shortest end, without its suffix, that tells all paths apart."""
    parts = [path.with_suffix("").parts for path in paths]
    ends = (["/".join(names[-count:]) for names in parts] for count in range(1, max(map(len, parts), default=0) + 1))
    return next((names for names in ends if len({*names}) == len({*parts})), [])


def find_baseline(text: str) -> Baseline | None:
    """Return a baseline's settings, None for another text. Raises InputError outside a clone, ConfigError if wrong."""
    if text.partition(":")[0] not in BASELINES:
        return None
    if not (REPOSITORY / "scripts" / "bench" / "baselines").is_dir():
        raise InputError("the baselines are in the repository, not in the package: run from a clone")
    sys.path.insert(0, str(REPOSITORY))  # an editable installation finds the packages only
    try:
        from scripts.bench.baselines.settings import parse
    finally:
        sys.path.remove(str(REPOSITORY))
    return parse(text)


def parse_setting(text: str) -> dict[str, Any]:
    """Read the options of S2O in a setting's text. Raises ConfigError naming the part that is wrong."""
    options: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name in options:
            raise ConfigError(f"setting {text!r} gives {name} twice: give it once")
        if name not in RULES or not equals:
            raise ConfigError(
                f"setting {text!r} has {part.strip()!r}, expected {', '.join(f'{option}=..' for option in RULES)}, or "
                f"one of {', '.join(BASELINES)} and a colon: try {EXAMPLE}"
            )
        options[name] = RULES[name].checked(value, f"setting {text!r}: {name}", EXAMPLE)
    if "tau" not in options:
        raise ConfigError(f"setting {text!r} has no tau, expected a threshold: try {EXAMPLE}")
    if "stop_rule" in options:
        options["stop_rule"] = StopRule.parse(options["stop_rule"])  # one spelling: "raw" is "paper"
    LayerConfig.uniform(1, tile=CPU_TILE, **options)
    return options


def normalise_setting(text: str) -> str:
    """Return a setting's text in one order and spelling. Raises ConfigError naming the part that is wrong."""
    if find_baseline(text) is not None:
        return text
    options = parse_setting(text)
    given = [name for name in RULES if name in options]
    return ",".join(f"{name}={options[name]:g}" if name == "tau" else f"{name}={options[name]}" for name in given)


def configure_layer(text: str, heads: int, tiles: tuple[TileConfig, ...]) -> LayerConfig:
    """Return the configuration of a layer with so many query heads from a setting that names no baseline.

    tiles: candidates, best first; empty where plain torch runs, which takes any tile. Raises ConfigError as
    `parse_setting` does.
    """
    config = LayerConfig.uniform(heads, tile=CPU_TILE, **parse_setting(text))
    return config.with_tile(next((tile for tile in tiles if config.segment % tile.rows == 0), CPU_TILE))
