"""A setting for all heads of a model, as text: "tau=0.3,segment=1024,representatives=16,tail=mean" or "pbs:keep=0.9".

This is the one place that knows what such a text may say.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s2o_runtime.config import LayerConfig, StopRule, TileConfig
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.fields import Rule

if TYPE_CHECKING:
    from scripts.bench.baselines.settings import Baseline

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
BASELINES = ("flash-prefill", "flash-prefill-v2", "pbs", "sparge", "xattention", "skip-softmax")
REPOSITORY = Path(__file__).resolve().parents[2]  # of a clone
CPU_TILE = TileConfig(block_m=64, block_n=64, chunk=4)  # its rows divide every legal segment


def baseline_of(text: str) -> Baseline | None:
    """Return the settings of a baseline, if the text begins with the name of one.

    Raises:
        ConfigError: an option of the baseline is wrong.
        InputError: this is an installed package, which has no baselines.
    """
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


def parsed(text: str) -> dict[str, Any]:
    """The options of S2O in a setting's text, checked. Raises ConfigError naming the part that is wrong."""
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


def named(text: str) -> str:
    """A setting's text in one order and spelling. Raises ConfigError naming the part that is wrong."""
    if baseline_of(text) is not None:
        return text
    options = parsed(text)
    given = [name for name in RULES if name in options]
    return ",".join(f"{name}={options[name]:g}" if name == "tau" else f"{name}={options[name]}" for name in given)


def config_of(text: str, heads: int, tiles: tuple[TileConfig, ...]) -> LayerConfig:
    """The setting of S2O for a whole layer.

    Args:
        text: a setting that names no baseline.
        heads: the layer's query heads.
        tiles: candidates, best first, of which the first that divides the segment is taken; empty where plain torch
            runs, which takes any tile.

    Raises:
        ConfigError: names the part of the text that is wrong.
    """
    config = LayerConfig.uniform(heads, tile=CPU_TILE, **parsed(text))
    fitting = (tile for tile in tiles if config.segment % tile.rows == 0)
    return config.with_tile(next(fitting, CPU_TILE))
