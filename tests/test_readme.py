"""README's table of architectures is of the tests that there are; what it is made with does what it says."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import architectures as script

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def item(name, test, **params):
    return SimpleNamespace(
        nodeid=f"{test}[{name}]", originalname=test, callspec=SimpleNamespace(params={"name": name} | params)
    )


def test_the_table_is_of_the_tests():
    """Collected as they are now, in a process of their own: what `make architectures` ran may be older."""
    command = [sys.executable, str(ROOT / "scripts" / "architectures.py"), "--check"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout[-500:]
    assert script.PASSED in set(script.shown(README).values()) <= {script.PASSED, script.SKIPPED}


def test_every_capability_has_a_test():
    assert {capability for _, capability in script.shown(README)} == set(script.CAPABILITIES)


def test_a_cell_is_what_all_its_tests_did():
    left, right = (item("llama", "test_padded_batch", side=side) for side in ("left", "right"))
    static = item("llama", "test_generate_greedily", cache="static")
    static.nodeid = "other"
    chunks = item("llama", "test_chunked_prefill_and_decode", cuts=(90,), cache="static")
    quantised = item("llama", "test_quantised_cache")
    other = SimpleNamespace(nodeid="x", originalname="test_prefill")
    found = script.cells([left, right, chunks, static, quantised, other], {quantised.nodeid: "skipped"})
    assert found == {
        ("llama", "left padding"): script.PASSED,
        ("llama", "right padding"): script.PASSED,
        ("llama", "2 chunks"): script.PASSED,
        ("llama", "greedy"): script.PASSED,
        ("llama", "static cache"): script.PASSED,
        ("llama", "quantised cache"): script.SKIPPED,
    }
    assert script.cells([chunks, static], {"other": "skipped"})["llama", "static cache"] == script.SKIPPED


def test_what_is_written_is_what_is_read():
    found = {("a", "beams"): script.PASSED, ("b", "compiled"): script.SKIPPED}
    text = script.with_table(f"before\n{script.START}\nold\n{script.END}\nafter\n", script.table(found))
    assert script.shown(text) == found
    assert text.startswith("before\n")
    assert text.endswith(f"{script.END}\nafter\n")
    assert script.with_table(text, script.table(found)) == text
    assert script.difference(found, script.shown(text)) is None
    assert "lacks c greedy" in script.difference(found | {("c", "greedy"): script.PASSED}, found)
    assert "has, without a test, b compiled" in script.difference({("a", "beams"): script.PASSED}, found)
    assert script.shown("no table") == {}
    with pytest.raises(ValueError, match="put them where the table belongs"):
        script.with_table("no marks", "")


def test_the_worst_of_setup_call_and_teardown_counts():
    recorder = script.Recorder()
    for outcome in ("passed", "skipped", "passed"):
        recorder.pytest_runtest_logreport(SimpleNamespace(nodeid="a", outcome=outcome))
    for outcome in ("passed", "passed", "failed"):
        recorder.pytest_runtest_logreport(SimpleNamespace(nodeid="b", outcome=outcome))
    assert recorder.outcomes == {"a": "skipped", "b": "failed"}
