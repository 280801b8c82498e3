"""The table of architectures in docs/models.md agrees with the tests that there are."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.docs import architectures as script

EXHAUSTIVE = pytest.mark.exhaustive(reason="collects tests in a process of its own")

ROOT = Path(__file__).parents[2]
MODELS = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


def item(name, test, **params):
    return SimpleNamespace(
        nodeid=f"{test}[{name}]", originalname=test, callspec=SimpleNamespace(params={"name": name} | params)
    )


@EXHAUSTIVE
def test_the_table_is_of_the_tests():
    """Collected as they are now, in a process of their own: what `make architectures` ran may be older."""
    command = [sys.executable, "-m", "scripts.docs.architectures", "--check"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout[-500:]
    capabilities = {cell for (_, column), cell in script.shown(MODELS).items() if column != script.OTHERS}
    assert script.PASSED in capabilities <= {script.PASSED, script.SKIPPED}


def test_a_cell_is_what_all_its_tests_did():
    left, right = (item("llama", "test_padded_batch", side=side) for side in ("left", "right"))
    static = item("llama", "test_generate_greedily", cache="static")
    static.nodeid = "other"
    chunks = item("llama", "test_chunked_prefill_and_decode", cuts=(90,), cache="static")
    quantised = item("llama", "test_quantised_cache")
    other = SimpleNamespace(nodeid="x", originalname="test_prefill")
    kinds = item("llama", script.OTHERS_TEST, others="1 sliding_attention")
    items = [left, right, chunks, static, quantised, other, kinds]
    assert script.cells(items, {quantised.nodeid: "skipped"}) == {
        ("llama", script.OTHERS): "1 sliding_attention",
        ("llama", "left padding"): script.PASSED,
        ("llama", "right padding"): script.PASSED,
        ("llama", "2 chunks"): script.PASSED,
        ("llama", "greedy"): script.PASSED,
        ("llama", "static cache"): script.PASSED,
        ("llama", "quantised cache"): script.SKIPPED,
    }
    assert script.cells([chunks, static], {"other": "skipped"})["llama", "static cache"] == script.SKIPPED
