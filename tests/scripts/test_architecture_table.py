"""The table of architectures in docs/models.md agrees with the tests that there are."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.docs import architectures as script

EXHAUSTIVE = pytest.mark.exhaustive(reason="collects tests in a process of its own")

ROOT = Path(__file__).parents[2]
MODELS = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


@EXHAUSTIVE
def test_the_table_is_of_the_tests():
    """Collected as they are now, in a process of their own: what `make architectures` ran may be older."""
    command = [sys.executable, "-m", "scripts.docs.architectures", "--check"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout[-500:]
    capabilities = {cell for (_, column), cell in script.shown(MODELS).items() if column != script.OTHERS}
    assert script.PASSED in capabilities <= {script.PASSED, script.SKIPPED}
