"""Commands as a user starts them: in this process, or, which takes seconds, in one of their own."""

import contextlib
import io
import signal
import sys
from types import SimpleNamespace

from support.pages import ROOT


def environment(home):
    """Nothing of the user's, no hub, and one thread: several processes on few cores wait for one another's threads."""
    places = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(home)}
    return places | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def command(module, *arguments):
    """The argument list that runs a module with this Python."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def called(main, *arguments, cwd):
    """Return what `main(argv)` returned in a folder, and what it wrote, as a finished process would have it."""
    terminate, typed = signal.getsignal(signal.SIGTERM), sys.argv
    sys.argv = [f"{main.__module__}.py", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(sys.argv[1:])
    except SystemExit as left:
        code = left.code
    finally:
        sys.argv = typed
        signal.signal(signal.SIGTERM, terminate)
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def refusal(outcome, program):
    """The one sentence of a command that refused its input."""
    (line,) = [line for line in outcome.stderr.splitlines() if line.strip()]
    assert outcome.returncode == 2, outcome
    assert line.startswith((f"{program}: ", f"{program} ")), line
    return line
