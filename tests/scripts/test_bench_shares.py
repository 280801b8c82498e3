"""scripts/bench/shares.py: the whole program at a tiny size."""

import pytest

from s2o_runtime.config import LayerConfig
from s2o_runtime.devices import interpreted
from scripts.bench import shares as bench


def test_dense_heads_are_spread():
    config = bench.with_dense(LayerConfig.uniform(8), 2)
    assert [head.mode == "dense" for head in config.heads] == [False, False, False, True] * 2
    assert sum(head.mode == "dense" for head in bench.with_dense(LayerConfig.uniform(4), 3).heads) == 3


@pytest.mark.slow(reason="kernels in Triton's interpreter, seconds each")
@pytest.mark.skipif(not interpreted(), reason="a GPU is here, so kernels are compiled")
def test_a_call_on_a_cpu(capsys):
    arguments = ["--queries", "64", "--keys", "512", "--shares", "4", "--heads", "2,1", "--dense", "1"]
    arguments += ["--head-dim", "64", "--segment", "128", "--density", "0.6", "--rounds", "1", "--steps", "2"]
    assert bench.main([*arguments, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 heads dense, the others at 0.6" in printed
    difference = float(printed.split()[-3])
    assert difference < 1e-5


def test_what_cannot_be_timed_is_said(capsys):
    assert bench.main(["--dense", "0", "--device", "cpu"]) == 2
    assert "--dense is 0: use at least 1" in capsys.readouterr().err
