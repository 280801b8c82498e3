"""Commands as processes of their own; most tests call `main(argv)` instead, because a start takes seconds."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(home):
    """Nothing of the user's, no hub, and one thread: several processes on few cores wait for one another's threads."""
    return {
        "PYTHONPATH": str(ROOT),
        "PATH": "/usr/bin:/bin",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
    }


def command(module, *arguments):
    """The argument list that runs a module with this Python."""
    return [sys.executable, "-m", module, *map(str, arguments)]
