"""A setting for all heads of a model, as text: "tau=0.3,segment=1024,representatives=32,tail" or "pbs:keep=0.9".

This is the one place that knows what such a text may say.
"""

from __future__ import annotations

from typing import Any

from s2o_runtime.baselines.settings import BASELINES, Baseline, parse
from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.errors import ConfigError

# the options of LayerConfig.uniform that a text may give, in the order in which a setting is named
KINDS: dict[str, tuple[type, str]] = {
    "tau": (float, "a number"),
    "segment": (int, "an integer"),
    "representatives": (int, "an integer"),
    "grain": (int, "an integer"),
    "threshold": (str, "a word"),
    "row_reduce": (str, "a word"),
}
SWITCHES = ("tail",)
EXAMPLE = "tau=0.3,segment=1024,representatives=32,tail"
CPU_TILE = TileConfig(block_m=64, block_n=64, chunk=4)  # its rows divide every legal segment


def other_method(text: str) -> Baseline | None:
    """The settings of another method than S2O, if the text begins with the name of one."""
    return parse(text) if text.partition(":")[0] in BASELINES else None


def parsed(text: str) -> dict[str, Any]:
    """The options of S2O in a setting's text, checked. Raises ConfigError naming the part that is wrong."""
    options: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        if name in options:
            raise ConfigError(f"setting {text!r} gives {name} twice: give it once")
        if name in SWITCHES and not equals:
            options[name] = True
        elif name in KINDS and equals:
            options[name] = _read(text, name, value)
        else:
            raise ConfigError(
                f"setting {text!r} has {part.strip()!r}, expected {', '.join(f'{each}=..' for each in KINDS)} or "
                f"{', '.join(SWITCHES)}, or one of {', '.join(BASELINES)} and a colon: try {EXAMPLE}"
            )
    if "tau" not in options:
        raise ConfigError(f"setting {text!r} has no tau, expected a threshold: try {EXAMPLE}")
    LayerConfig.uniform(1, tile=CPU_TILE, **options)
    return options


def named(text: str) -> str:
    """A setting's text in one order and spelling. Raises ConfigError naming the part that is wrong."""
    if other_method(text) is not None:
        return text
    options = parsed(text)
    shown = [f"{name}={options[name]:g}" if name == "tau" else f"{name}={options[name]}" for name in _given(options)]
    return ",".join([*shown, *(name for name in SWITCHES if name in options)])


def config_of(text: str, heads: int, tiles: tuple[TileConfig, ...]) -> LayerConfig:
    """The setting for a layer of so many query heads, with the first of the device's tiles that fits its segment.

    tiles: candidates, best first; empty where plain torch runs, which takes any tile.
    """
    other = other_method(text)
    if other is None:
        config = LayerConfig.uniform(heads, tile=CPU_TILE, **parsed(text))
    else:
        config = LayerConfig((HeadConfig(mode="blocks", blocks=other),) * heads, CPU_TILE).validate()
    segment = config.heads[0].segment
    fitting = (tile for tile in tiles if segment % tile.rows == 0)
    return config.with_tile(next(fitting, CPU_TILE))


def _given(options: dict[str, Any]) -> list[str]:
    return [name for name in KINDS if name in options]


def _read(text: str, name: str, value: str) -> Any:
    kind, expected = KINDS[name]
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"setting {text!r}: {name} is {value!r}, expected {expected}: try {EXAMPLE}") from None
