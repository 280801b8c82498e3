"""Calls that compile kernels beside one another, and which layers need which kernels."""

import os
import threading
from dataclasses import replace

import pytest

from calibrate.timing import THREADS, compile_ahead, get_kernel_form, start_compiling, with_tiles, without_stride
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.kernels import keys, prefill, splits, tail
from s2o_runtime.kernels.rank import means, order, scores
from s2o_runtime.tiles import list_candidate_tiles
from support.kernels import inputs

TILE = TileConfig(64, 64, 2, 4, 2)
LAYER = LayerConfig.uniform(2, tau=1.0, segment=64, tile=TILE)
DENSE = HeadConfig(mode="dense", segment=64)


def test_calls_are_made_beside_one_another(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    together = threading.Barrier(4)
    compile_ahead([lambda: together.wait(20)] * 4)  # each waits for the others
    assert not together.broken
    assert THREADS >= 4


def test_a_call_that_the_gpu_cannot_run_does_not_stop_the_others():
    def fails():
        raise RuntimeError("out of shared memory")

    made = []
    compile_ahead([fails, lambda: made.append(1), fails, lambda: made.append(2)])
    assert sorted(made) == [1, 2]


def test_a_call_that_is_wrong_is_an_error():
    with pytest.raises(KeyError):
        compile_ahead([{}.popitem])


def test_a_block_goes_on_while_calls_are_made_and_leaves_out_what_did_not_begin(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    begun, inside, made = threading.Event(), threading.Event(), []

    def waits():
        begun.set()
        made.append(inside.wait(20))

    with start_compiling([waits]) as finish:
        inside.set()
        finish()
        assert made == [True]
    inside.clear()
    begun.clear()
    with start_compiling([waits, lambda: made.append("left out")]):
        begun.wait(20)
    inside.set()  # nobody has waited for what was begun
    assert "left out" not in made


def test_tiles_that_differ_in_their_stride_alone_have_one_kernel():
    tiles = list_candidate_tiles(128, (9, 0))
    layers = with_tiles(LayerConfig.uniform(2, segment=1024, tile=tiles[0]), tiles)
    assert [without_stride(layer.tile) for layer in layers] == list(dict.fromkeys(map(without_stride, tiles)))
    assert len(layers) < len(tiles)
    assert {layer.tile for layer in layers} <= set(tiles)


LAYERS = {
    "one": LAYER,
    "other thresholds": LayerConfig.uniform(2, tau=9.0, segment=64, tile=TILE),
    "another segment": LayerConfig.uniform(2, tau=1.0, segment=128, tile=TILE),
    "more representatives": LayerConfig.uniform(2, tau=1.0, segment=64, representatives=16, tile=TILE),
    "tail": LayerConfig.uniform(2, tau=1.0, segment=64, tail="mean", tile=TILE),
    "one tail": replace(LAYER, heads=(LAYER.heads[0], replace(LAYER.heads[0], tail="mean"))),
    "one dense": replace(LAYER, heads=(LAYER.heads[0], DENSE)),
    "int8": replace(LAYER, scores="int8"),
}


def test_layers_of_one_form_need_the_same_kernel(monkeypatch):
    """The constants of the launch of attention are those of the form, and those of different forms differ."""
    constants = []

    def recorded(kernel, grid, arguments, of_kernel, **options):
        constants.append(tuple(of_kernel.items()))  # and no launch: what would be computed is tested elsewhere

    for module in (keys, prefill, splits, tail, means, order, scores):
        monkeypatch.setattr(module, "launch", recorded if module is prefill else lambda *_, **__: None)
    q, k, v = inputs(1, 2, 1, 66, 130, 64)
    of_form = {}
    for config in LAYERS.values():
        constants.clear()
        s2o_attention(q, k, v, config, backend="triton")
        of_form.setdefault(get_kernel_form(config), set()).add(constants[-1])
    assert all(len(each) == 1 for each in of_form.values())
    assert len({next(iter(each)) for each in of_form.values()}) == len(of_form) == 4
