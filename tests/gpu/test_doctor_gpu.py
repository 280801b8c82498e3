"""s2o-doctor on a GPU: the compiled kernels pass its self-test, and in the time that is promised once compiled."""

import json
import time

import pytest
import torch

from s2o_runtime.devices import get_capability
from s2o_runtime.doctor.command import main
from s2o_runtime.doctor.self_test import check_kernel, list_kernel_tiles, run_self_test

GPU = torch.device("cuda", 0)


def test_every_kernel_of_this_gpu_passes(nan_filled):
    findings = run_self_test(GPU)
    assert [finding.verdict for finding in findings] == ["ok"] * (2 if get_capability(GPU) == (9, 0) else 1), findings


@pytest.mark.parametrize("length", [301, 1021, 2045])
def test_other_odd_lengths_have_the_references_errors(length):
    """Of 301 tokens nothing is skipped: the prefix is one chunk at most."""
    for tile in list_kernel_tiles(GPU):
        value, wrong = check_kernel(GPU, tile, length)
        assert not wrong, (value, wrong)


def test_it_takes_two_seconds_once_the_kernels_are_compiled():
    run_self_test(GPU)
    times = []
    for _ in range(3):
        start = time.monotonic()
        run_self_test(GPU)
        times.append(time.monotonic() - start)
    assert min(times) <= 2


def test_the_command_is_ready(capsys):
    assert main(["--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ready"]
    assert all(finding["verdict"] == "ok" for finding in document["self-test"]["findings"])
