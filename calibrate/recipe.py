"""The recipe of a calibration: one validated dataclass whose fields state every option of s2o-calibrate."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from calibrate.options import Option, check_names, collect_options, either, format_value, option, read_options
from calibrate.record import RecordedBudget
from s2o_runtime.config import LAST_ROWS, LOOKBACK, LOOKBACKS, MAX_SEGMENT, MIN_SEGMENT, SEGMENT_STEP, KvCacheDtype
from s2o_runtime.errors import ConfigError
from s2o_runtime.fields import DURATION, SHARE, TOKENS, Rule
from s2o_runtime.files import PROFILES
from s2o_runtime.lengths import MAX_LENGTH
from s2o_runtime.profile.record import BUDGET_KINDS, BudgetKind, ErrorUnit, get_error_unit

SEGMENTS = (256, 512, 1024, 2048)
MAX_REL_MSE = 2e-2  # of any layer and head under a budget of answers: what text unlike the calibration's may do
SAMPLED_ROWS = 8192  # of a prompt of twice as many or more, about so many rows make its curves on a GPU
WINDOWS, WINDOW_ROWS = 16, 1024  # parts of a long prompt, and the rows of each whose errors are proven
DEFAULT_LENGTHS = {"cuda": (8192, 32768), "cpu": (1024, 2048)}  # tokens, by the kind of the device
DEFAULT_LAST_ROWS, LAST_PART = 256, 32  # rows that run dense by default, and one in so many of a prompt at most
CHECK_STEP = 256  # tokens; a default check length is a multiple of it
# of the built-in text, in the order in which prompts take them
DOMAINS = ("code", "prose", "chinese", "json", "chat", "tables", "logs", "encoded", "questions", "mixed")
MAX_YAML_BYTES = 1 << 16
# Bounds that no use needs: a slip of the keyboard is found before hours of measuring, not after them.
MAX_COUNT = 1_000_000  # prompts or trials; no run finishes so many
MAX_SEED = (1 << 63) - 1  # the largest that a profile's record holds
MAX_MSE = 1e6  # an error of 1000 in every number, where outputs of attention are hardly beyond 100
MAX_ROW_ERROR = 1000.0  # norms of the row
MAX_KL = 10.0  # nats per token, where answers have nothing in common
MAX_SECONDS = 366 * 86400.0  # a year
MAX_GPUS = 128  # of one machine; without GPUs as many processes are started
GROUPS = INPUT, PROOF, SPACE, OUTPUT, WORKERS = (
    "what to calibrate", "what error is allowed, and how it is proven", "what to choose from, and for how long",
    "output", "many GPUs",
)  # fmt: skip
REPORT = ("report.json", "summary.png", "density.png", "frontier.png", "report.md", "report.html")
# settings of shipped profiles, which decide nothing here
REMOVED = ("linear_tails", "representatives", "grains", "scope", "per_prompt", "scores")
SCHEDULER = re.compile(r"(tcp|ucx|ws)://\S+:\d+")


@dataclass(frozen=True)
class Budget:
    """The error that a calibration is allowed: of the model's answers, or of each layer's attention.

    Args:
        kind: "kl" is KL(dense || patched) in nats per token at the rows that answer, behind a finished prefill. "mse"
            is the mean squared difference from dense attention over a layer's whole output; "rel_mse" is the same
            divided by the dense output's mean square, which carries over between models.
        value: above 0, in the kind's unit.
        ceiling: the largest rel_mse beside an mse, so that a layer of small outputs keeps them; None or 0: no ceiling.

    >>> Budget.from_options({"budget_mse": 1e-4})
    Budget(kind='mse', value=0.0001, ceiling=0.01)
    """

    kind: BudgetKind
    value: float
    ceiling: float | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Budget:
        """Return the budget that is given; without any the default one, which random weights have of errors alone.

        Raises ConfigError for two budgets, or a ceiling beside another budget than an mse.
        """
        default = RANDOM_BUDGET if options.get("random_weights") else DEFAULT_BUDGET
        kinds = [kind for kind in BUDGET_KINDS if f"budget_{kind}" in options] or [default.kind]
        if len(kinds) > 1:
            raise ConfigError(f"budget_{kinds[0]} and budget_{kinds[1]} are both given: choose one")
        ceiling = options.get("ceiling_rel_mse", DEFAULT_CEILING if kinds == ["mse"] else None) or None
        return cls(kinds[0], options.get(f"budget_{kinds[0]}", default.value), ceiling).validate()

    def validate(self) -> Budget:
        """Return the budget itself, or raise ConfigError."""
        if self.kind not in BUDGET_KINDS:
            raise ConfigError(f"budget kind is {self.kind!r}: expected {' or '.join(BUDGET_KINDS)}")
        OPTIONS[f"budget_{self.kind}"].check(self.value)
        OPTIONS["ceiling_rel_mse"].check(self.ceiling)
        if self.ceiling and self.kind != "mse":
            raise ConfigError(
                f"ceiling_rel_mse {self.ceiling:g} goes with budget_mse only, but the budget is {self.kind} "
                f"{self.value:g}: leave it out, or give a budget_mse"
            )
        return self

    @property
    def unit(self) -> ErrorUnit:
        """The unit of a layer's errors and limits."""
        return get_error_unit(self.kind)

    def error(self, mse: float, dense_power: float) -> float:
        """Return a layer's error in the budget's `unit`, from its mse and the dense output's mean square."""
        return mse if self.unit == "mse" else mse / max(dense_power, 1e-30)  # a layer may have no output at all

    def limit(self, dense_power: float) -> float:
        """Return a layer's largest error limit in the budget's `unit`, by the mean square of its dense output.

        Under a budget of answers each layer is given its own (`calibrate.proof.weigh`).
        """
        if self.kind == "kl":
            return MAX_REL_MSE
        return min(self.value, self.ceiling * max(dense_power, 1e-30)) if self.ceiling else self.value

    def as_json(self) -> dict[str, Any]:
        """Return the budget as a profile holds it."""
        ceiling = {"ceiling_rel_mse": self.ceiling} if self.ceiling else {}
        return {"kind": self.kind, "value": self.value} | ceiling

    def __str__(self) -> str:
        return f"{self.kind.replace('_', '-')}-{self.value:g}"


DEFAULT_BUDGET = Budget("kl", 2e-3)
RANDOM_BUDGET = Budget("rel_mse", 1e-3)  # the default of random weights, whose answers are noise
DEFAULT_CEILING = 1e-2


def _format_budget(recipe: Recipe) -> str:
    budget = recipe.budget
    ceiling = "" if not budget.ceiling else f" and rel_mse {budget.ceiling:g}, whichever allows a layer less"
    return f"{budget.kind} {budget.value:g}{ceiling}"


@dataclass(frozen=True)
class Recipe:
    """One calibration run: every field is an option of s2o-calibrate, which its `Option` describes.

    The field `budget` is one of the options budget_kl, budget_mse (with ceiling_rel_mse) and budget_rel_mse, and
    `needles` is the option keep_needles. docs/options.md lists all of them.

    >>> from pathlib import Path
    >>> Recipe.from_options({"model": "demo", "lengths": (1024, 2048), "out": Path("p.safetensors")}).budget
    Budget(kind='kl', value=0.002, ceiling=None)
    """

    # fmt: off
    model: str = option(
        Rule(str), "an alias such as demo or qwen2.5-7b, a local folder, or a hub id", INPUT, example="demo")
    budget: Budget = either(
        Option(Rule(float, 0, MAX_KL, above=True), "what the model's answers may change behind a prompt: KL(dense || "
            "patched) in nats per token, at the rows that answer", PROOF, name="budget_kl",
            default_text=f"{DEFAULT_BUDGET.value:g}, or twice what two dense kernels differ by", example="2e-3",
            label="budget", plan_text=_format_budget),
        Option(Rule(float, 0, MAX_MSE, above=True), "mean squared error of its attention that a layer may have", PROOF,
            name="budget_mse", example="1e-4", label="budget", plan_text=_format_budget),
        Option(Rule(float, 0, 1, optional=True), "with budget_mse, what a layer's error may be relative to the mean "
            "square of its dense output, so that a layer of small outputs keeps them; 0: no ceiling", PROOF,
            name="ceiling_rel_mse", default_text=f"{DEFAULT_CEILING:g}", example="1e-2", label="budget",
            plan_text=_format_budget),
        Option(Rule(float, 0, 1, above=True), "the same relative to the mean square of the dense output", PROOF,
            name="budget_rel_mse", default_text=f"{RANDOM_BUDGET.value:g} with --random-weights", example="1e-3",
            label="budget", plan_text=_format_budget),
    )
    lengths: tuple[int, ...] = option(
        Rule(int, 1, MAX_LENGTH, unit=TOKENS, many=True), "prompt lengths to calibrate", INPUT, example="8192,32768",
        default_text=f"{format_value(DEFAULT_LENGTHS['cuda'])}; on a CPU {format_value(DEFAULT_LENGTHS['cpu'])}")
    out: Path = option(
        Rule(Path), "the profile", OUTPUT, default_text="profiles/<model>/<gpu>/<budget>.safetensors")
    prompts: tuple[Path, ...] | None = option(
        Rule(Path, optional=True, many=True),
        "your prompts: files of JSON lines (text, prompt or messages), text or Markdown, and folders of them", INPUT,
        default=None, metavar="PATH,PATH", default_text="the built-in text", example="mine.jsonl",
        plan_text=lambda recipe: recipe.prompt_source if recipe.prompts else "built-in text")
    domains: tuple[str, ...] | None = option(
        Rule(str, allowed=DOMAINS, optional=True, many=True), "kinds of built-in text to calibrate on, in turns", INPUT,
        default=None, metavar="NAME,NAME", default_text="all", example="code,prose",
        plan_text=lambda recipe: "your prompts'" if recipe.prompts else format_value(recipe.used_domains, ", "))
    hide_needles: bool = option(
        Rule(bool), "hide facts in the prompts and ask for them at their end", INPUT, default=True)
    num_prompts: int = option(
        Rule(int, 1, MAX_COUNT), "prompts of each length to calibrate on", INPUT, default=5,
        plan_text="{} of each length")
    held_out: int = option(
        Rule(int, 1, MAX_COUNT), "other prompts of each length to adjust layers and prove the profile on", PROOF,
        default=10, name="num_held_out", plan_text="{} of each length")
    num_certify: int = option(
        Rule(int, 0, MAX_COUNT),
        "further prompts of each length that the finished profile is certified on; 0: no certificate", PROOF,
        default=20, plan_text="{} of each length", unset="none")
    seed: int = option(Rule(int, 0, MAX_SEED), "seed of prompts and random weights", INPUT, default=0)
    trials: int = option(
        Rule(int, 1, MAX_COUNT), "most trials of the search for each group of like layers at each length", SPACE,
        default=16, plan_text="{} for each group of like layers at each length")
    margin: float = option(
        Rule(float, 0, 1, above=True, unit=SHARE),
        "share of the budget that layers may spend on the adjust prompts; the rest is left for prompts not seen", PROOF,
        default=0.9, plan_text="{:.0%} of the budget is spent")
    device: str = option(
        Rule(str), "cuda, cuda:1 or cpu", INPUT, default="cpu", default_text="a GPU if there is one")
    segments: tuple[int, ...] = option(
        Rule(int, MIN_SEGMENT, MAX_SEGMENT, multiple=SEGMENT_STEP, many=True), "queries that may share a ranking",
        SPACE, default=SEGMENTS, plan_text=lambda recipe: "; ".join(
            f"{format_value(recipe.select_segments(long), ', ')} at {long}" for long in recipe.lengths))
    lookbacks: tuple[int, ...] = option(
        Rule(int, allowed=LOOKBACKS, many=True),
        "how many keys before a segment a layer may always visit; more where its first rows err most", SPACE,
        default=(LOOKBACK,))
    tails: tuple[bool, ...] = option(
        Rule(bool, many=True), "whether a head may, must or must not add an estimate of what it skips", SPACE,
        default=(False, True), metavar="on,off")
    check_lengths: tuple[int, ...] | None = option(
        Rule(int, 1, MAX_LENGTH, unit=TOKENS, optional=True, many=True, empty=True),
        "lengths to prove without calibrating them, or none", PROOF,
        default=None, default_text="one between any two neighbours", example="16384",
        plan_text=lambda recipe: format_value(recipe.checked_lengths, ", "))
    chunk: int | None = option(
        Rule(int, SEGMENT_STEP, MAX_LENGTH, unit=TOKENS, optional=True),
        "tokens that a server feeds at once (vLLM's max_num_batched_tokens): the proof feeds prompts so too", PROOF,
        default=None, default_text="whole prompts", example="8192", plan_text="{} tokens", unset="whole prompts")
    kv_cache_dtype: KvCacheDtype = option(
        Rule(str, allowed=get_args(KvCacheDtype)), "the type of the server's KV cache; fp8 rounds keys and values to "
        "e4m3 with a scale of 1, which is a part of each layer's error", PROOF,
        default="auto", default_text="auto, the model's own",
        plan_text=lambda recipe: "e4m3" if recipe.kv_cache_dtype == "fp8" else "the model's type")
    last_rows: int | None = option(
        Rule(int, allowed=LAST_ROWS, optional=True), "queries at a prompt's end that run dense, because they answer",
        PROOF, default=None, example="256",
        default_text=f"{DEFAULT_LAST_ROWS}, fewer where that is more than one in {LAST_PART} of a prompt",
        plan_text=lambda recipe: "; ".join(f"{recipe.count_last_rows(long)} at {long}" for long in recipe.lengths))
    time_limit: float | None = option(
        Rule(float, 0, MAX_SECONDS, above=True, unit=DURATION, optional=True), "time for the whole search", SPACE,
        default=None, example="90, 5m or 1h", plan_text="{:g} s", unset="none")
    worst_rows: float | None = option(
        Rule(float, 0, MAX_ROW_ERROR, optional=True),
        "largest error of a row, as a share of its norm, in 99 of 100 row tiles; 0: no limit", PROOF,
        default=0.7, plan_text="{:g}", unset="off")
    needles: float = option(
        Rule(float, 0, 1, unit=SHARE),
        "share of the needles found by the dense model that the patched one must find too; below 1, one may be lost",
        PROOF, default=0.95, name="keep_needles", plan_text="{:.0%} of those that dense finds")
    random_weights: bool = option(
        Rule(bool), "the model's architecture without its weights", INPUT,
        default=False, label="weights", plan_text="random", unset="the model's")
    tokenizer: str | None = option(
        Rule(str, optional=True),
        "a local folder or hub id with the tokenizer, such as that of the model that a GGUF file was made of", INPUT,
        default=None, default_text="the model's", unset="the model's")
    trust_remote_code: bool = option(
        Rule(bool), "run code that comes with the model; without this it never runs", INPUT,
        default=False, label="code of the model", plan_text="runs", unset="does not run")
    allow_regression: bool = option(
        Rule(bool), "write a profile even if its proof fails; the profile says so", PROOF,
        default=False, label="if the proof fails", plan_text="written", unset="not written")
    journal: Path | None = option(
        Rule(Path, optional=True), "the measurements, from which an interrupted run continues", OUTPUT,
        default=None, default_text="<model>.journal.sqlite beside the profile",
        plan_text=lambda recipe: str(recipe.journal_path))
    storage: str | None = option(
        Rule(str, optional=True), "URL of an Optuna storage that keeps the trials, which optuna-dashboard opens",
        OUTPUT, default=None, metavar="URL", example="sqlite:///studies.db", default_text="kept in memory",
        unset="in memory")
    gpus: int | None = option(
        Rule(int, 1, MAX_GPUS, optional=True),
        "GPUs of this machine to work on, each with a process of its own; without GPUs so many processes on the CPU",
        WORKERS, default=None, default_text="this process alone", example="8",
        plan_text="{} workers on this machine", unset="not used")
    scheduler: str | None = option(
        Rule(str, optional=True), "address of a Dask scheduler whose workers are used, each with one GPU", WORKERS,
        default=None, metavar="ADDRESS", default_text="none", example="tcp://head-node:8786", unset="none")
    target_gpu: str | None = option(
        Rule(str, optional=True), "the kind of GPU that the profile is for, by its name or a part of it: only workers "
        "that have it are used, and --dry-run plans for it where it is not", WORKERS,
        default=None, default_text="the kind here, or the only one; of several kinds one must be named", example="H200",
        unset="the kind here")
    # fmt: on

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Recipe:
        """Return the validated recipe of `OPTIONS` in their fields' types; model, lengths and out must be there."""
        check_names(OPTIONS, options, "the recipe")
        settings = {OPTIONS[name].field: value for name, value in options.items()}
        budget = Budget.from_options(options)
        return cls(**settings | {"budget": budget}).validate()

    @classmethod
    def from_record(cls, settings: Mapping[str, Any], out: Path) -> Recipe:
        """Return the recipe that made this `record`. Raises what a foreign one leads to: KeyError, TypeError, ..."""
        settings = {"last_rows": 0} | dict(settings)  # of versions before there were any
        if settings.get("scope") == "model":
            raise ValueError("its budget is of all layers together, which this version does not have")
        by_field = {entry.field: entry for entry in OPTIONS.values()}
        allowed = settings.pop("budget")
        ceiling = OPTIONS["ceiling_rel_mse"].read(allowed.get("ceiling_rel_mse"))
        budget = Budget(allowed["kind"], OPTIONS["budget_mse"].read(allowed["value"]), ceiling)
        others = {name: by_field[name].read(value) for name, value in settings.items() if name not in REMOVED}
        return cls(**others | {"budget": budget, "out": out}).validate()

    @property
    def recorded_budget(self) -> RecordedBudget:
        """The budget as a profile records it."""
        return RecordedBudget.from_json(self.budget.as_json())

    def binds(self, limit: float) -> ErrorUnit | None:
        """Return the unit of the smaller limit, of an mse and its ceiling; None for other budgets."""
        if not self.budget.ceiling:
            return None
        return "mse" if limit >= self.budget.value else "rel_mse"

    @property
    def checked_lengths(self) -> tuple[int, ...]:
        """The lengths to prove without calibration: by default the geometric mean of any two neighbours, in steps."""
        if self.check_lengths is not None:
            return self.check_lengths
        between = ((a, round(math.sqrt(a * b) / CHECK_STEP) * CHECK_STEP, b) for a, b in pairwise(self.lengths))
        return tuple(check for shorter, check, longer in between if shorter < check < longer)

    @property
    def all_lengths(self) -> tuple[int, ...]:
        """Every length that is proven: the calibrated ones, then those that are only checked."""
        return (*self.lengths, *self.checked_lengths)

    @property
    def noise_lengths(self) -> list[int]:
        """The lengths at which two dense kernels are compared: the shortest and the longest that is calibrated."""
        return sorted({min(self.lengths), max(self.lengths)})

    @property
    def prompt_source(self) -> str:
        """The prompts' files, or kinds of built-in text, in words."""
        sources = format_value(self.prompts or self.used_domains, ", ")
        return sources if self.prompts else f"built-in {sources}"

    @property
    def used_domains(self) -> tuple[str, ...]:
        """The kinds of built-in text that are used; none where the user gives prompts."""
        return () if self.prompts else self.domains or DOMAINS

    @property
    def loading(self) -> dict[str, Any]:
        """The arguments that `model.models.load` and `load_tokenizer` take."""
        return {name: getattr(self, name) for name in ("random_weights", "trust_remote_code", "tokenizer")}

    @property
    def is_distributed(self) -> bool:
        """True if other processes do the work."""
        return self.gpus is not None or self.scheduler is not None

    @property
    def journal_path(self) -> Path:
        """The journal's file: beside the profile and named by the model alone, so that other budgets find it."""
        return self.journal or self.out.parent / f"{make_slug(self.model)}.journal.sqlite"

    def validate(self) -> Recipe:
        """Return the recipe itself. Raises ConfigError for an option out of its range, or two that do not fit."""
        for entry in OPTIONS.values():
            if entry.field != "budget":
                entry.check(getattr(self, entry.field))
        self.budget.validate()
        for conflict in self._list_conflicts():
            raise ConfigError(conflict)
        return self

    def _list_conflicts(self) -> Iterator[str]:
        """Yield a sentence for each set of options that do not fit each other."""
        if self.lengths[0] < self.segments[0]:
            yield f"length {self.lengths[0]} is shorter than one segment of {self.segments[0]}: use a longer one"
        for length in self.check_lengths or ():
            if length in self.lengths:
                yield f"check length {length} is calibrated: use one that is not among the lengths"
            if length < self.lengths[0]:
                yield (
                    f"check length {length} is below {self.lengths[0]}, the shortest that is calibrated, where "
                    "prompts stay dense: use a longer one"
                )
        if self.budget.kind == "kl" and self.random_weights:
            yield f"random weights have no answers that a budget ({self.budget}) could hold: use budget_rel_mse"
        domains = format_value(self.domains)
        if self.prompts is not None and self.domains is not None:
            yield f"domains {domains} are of the built-in text, but prompts are given: leave one out"
        if len(set(self.used_domains)) < len(self.used_domains):
            yield f"domains {domains} name one twice: leave one out"
        if self.gpus is not None and self.scheduler is not None:
            yield f"gpus {self.gpus} starts workers here, but scheduler {self.scheduler} has its own: leave one out"
        if self.scheduler is not None and not SCHEDULER.fullmatch(self.scheduler):
            yield f"scheduler {self.scheduler!r} is no address: expected one like tcp://head-node:8786"
        if not self.is_distributed and self.target_gpu is not None:
            remedy = "give gpus, scheduler or --dry-run too, or leave it out"
            yield f"target_gpu is for many workers, or for a plan: {remedy}"
        for path in (self.out, *list_report_paths(self.out)):
            if self.journal_path.resolve() == path.resolve():
                yield f"{path} cannot be the journal too: give another --journal or --out"

    def select_segments(self, length: int) -> tuple[int, ...]:
        """Return the segments worth trying at a length: at least half of a prompt must lie in some prefix."""
        return tuple(segment for segment in self.segments if segment <= max(self.segments[0], length // 2))

    def count_last_rows(self, length: int) -> int:
        """Return the number of queries at the end of a prompt of so many tokens that run dense."""
        if self.last_rows is not None:
            return self.last_rows
        return max(rows for rows in LAST_ROWS if rows <= min(DEFAULT_LAST_ROWS, length // LAST_PART))

    def record(self) -> dict[str, Any]:
        """Return the settings that decide the result, for the profile; where files are written does not."""
        settings = asdict(self) | {"budget": self.budget.as_json()}
        for entry in OPTIONS.values():
            if entry.group in (OUTPUT, WORKERS):  # the files, and who measures
                settings.pop(entry.field, None)
        settings["prompts"] = tuple(path.name for path in self.prompts) if self.prompts else None
        settings["domains"] = self.used_domains or None
        settings["check_lengths"] = self.checked_lengths
        if self.kv_cache_dtype == "auto":  # the profiles of versions before it have none
            del settings["kv_cache_dtype"]
        return {name: _encode(value) for name, value in settings.items()}

    def to_yaml(self) -> str:
        """Return every option as a file that `load_yaml` reads."""
        import yaml

        options = {name: getattr(self, entry.field) for name, entry in OPTIONS.items() if entry.field != "budget"}
        options[f"budget_{self.budget.kind}"] = self.budget.value
        if self.budget.kind == "mse":
            options["ceiling_rel_mse"] = self.budget.ceiling
        plain = {name: _encode(options[name]) for name in OPTIONS if name in options}
        return str(yaml.safe_dump(plain, sort_keys=False, default_flow_style=None))


OPTIONS = collect_options(Recipe, GROUPS)


def check_limit(length: int, limit: int) -> None:
    """Raise ConfigError if a prompt's length is beyond the tokens that a model can read."""
    if length > limit:
        raise ConfigError(
            f"length {length} is beyond the model's limit of {limit}: use a shorter one, or a folder whose config.json "
            "asks for YaRN (docs/models.md#longer-prompts)"
        )


def place_profile(model: str, device_name: str, budget: Budget, root: Path = PROFILES) -> Path:
    """Return profiles/<model>/<gpu>/<budget>.safetensors."""
    return root / make_slug(model) / make_slug(device_name) / f"{budget}.safetensors"


def list_report_paths(profile: Path) -> list[Path]:
    """Return the files of the report beside a profile; the page that holds all of it is the last."""
    return [profile.parent / f"{profile.stem}.{name}" for name in REPORT]


def make_slug(name: str) -> str:
    """Return a name as a part of a path: lower case, with dashes for all but letters, digits and points."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "model"


def load_yaml(path: Path) -> dict[str, Any]:
    """Read the options in a recipe file, in the types of `Recipe`; file names in it are relative to the working folder.

    Raises ConfigError, which names the file, the option, what was found and what was expected.
    """
    import yaml

    try:
        with path.open("rb") as file:
            data = file.read(MAX_YAML_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read ({error.strerror}): check the path") from error
    if len(data) > MAX_YAML_BYTES:
        raise ConfigError(f"recipe {path} is larger than {MAX_YAML_BYTES} bytes: it is not a recipe")
    try:
        loader = yaml.SafeLoader(data)
        root = loader.get_single_node()  # which still has keys that are there twice
        document = root and loader.construct_document(root)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"recipe {path} is not YAML ({' '.join(str(error).split())}): correct it") from error
    if root is None or not isinstance(document, dict):
        problem = "is empty" if root is None else f"holds a {type(document).__name__}"
        raise ConfigError(f"recipe {path} {problem}: expected lines such as trials: 16")
    for key, count in Counter(key.value for key, _ in root.value).items():
        if count > 1:
            raise ConfigError(f"recipe {path} has {key} twice: give it once")
    return read_options(OPTIONS, document, f"recipe {path}")


def merge_options(file: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a recipe file, overridden by flags.

    A budget among the flags replaces one of any kind, and takes a ceiling with it if it is no mse.
    """
    budgets = {f"budget_{kind}" for kind in BUDGET_KINDS}
    replaced = budgets if budgets & flags.keys() else set()
    if replaced and "budget_mse" not in flags:
        replaced = replaced | {"ceiling_rel_mse"}
    return {name: value for name, value in file.items() if name not in replaced} | dict(flags)


def _encode(value: Any) -> Any:
    """Convert a field's value to the types of JSON and YAML."""
    return list(map(_encode, value)) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
