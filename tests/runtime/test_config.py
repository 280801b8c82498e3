import json

import pytest

from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig, convert_to_json
from s2o_runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (HeadConfig(tau=-1.0), "tau -1.0 is out of range"),
        (HeadConfig(tau=float("nan")), "tau nan is out of range"),
        (HeadConfig(tau="1"), "tau '1' is out of range"),  # type: ignore[arg-type]
        (HeadConfig(segment=100), "segment 100 is not a multiple of 64"),
        (HeadConfig(segment=0), "segment 0 is out of range"),
        (HeadConfig(segment=True), "segment True is out of range"),
        (HeadConfig(mode="sparse"), "mode 'sparse' is not known"),  # type: ignore[arg-type]
        (HeadConfig(stop_rule="rest"), "stop_rule 'rest' is not a StopRule"),  # type: ignore[arg-type]
        (TileConfig(block_m=100), "block_m 100 is not supported"),
        (TileConfig(block_n=16), "block_n 16 is not supported"),
        (TileConfig(chunk=0), "chunk 0 is out of range"),
        (TileConfig(num_stages=9), "num_stages 9 is not supported"),
        (TileConfig(dense_below=-1), "dense_below -1 is out of range"),
        (TileConfig(min_queries=1), "min_queries 1 is out of range"),
        (TileConfig(tail_keys=-1), "tail_keys -1 is out of range"),
        (TileConfig(block_m=128, num_warps=4), "spills registers"),
    ],
)
def test_illegal_heads_and_tiles_name_field_and_value(config, message):
    layer = LayerConfig((config,)) if isinstance(config, HeadConfig) else LayerConfig((HeadConfig(),), config)
    with pytest.raises(ConfigError, match=message):
        layer.validate()


def test_a_tile_may_not_cross_a_segment():
    with pytest.raises(ConfigError, match="segment 64 of head 0 is not a multiple of 128, the rows of tile"):
        LayerConfig.uniform(1, segment=64, tile=TileConfig(block_m=128))
    LayerConfig.uniform(1, segment=64, tile=TileConfig(block_m=128), mode="dense")
    with pytest.raises(ConfigError, match="segment 64 of head 0 is not a multiple of 128"):  # two row tiles a program
        LayerConfig.uniform(1, segment=64, tile=TileConfig(64, 128, 4, 4, 2, specialized=True))


@pytest.mark.parametrize(("text", "rule"), [*((str(rule), rule) for rule in StopRule), ("raw", StopRule.PAPER)])
def test_a_stop_rule_is_written_in_lower_case(text, rule):
    assert LayerConfig.uniform(1, stop_rule=text).heads[0].stop_rule is rule
    assert f"{rule}" == f"{rule:s}" == str(StopRule.parse(text)) == rule.name.lower()
    assert json.loads(json.dumps(convert_to_json(HeadConfig(stop_rule=rule))))["stop_rule"] == str(rule)
    with pytest.raises(ConfigError, match="stop_rule 'Rest' is not known: use one of rest, paper"):
        LayerConfig.uniform(1, stop_rule="Rest")
