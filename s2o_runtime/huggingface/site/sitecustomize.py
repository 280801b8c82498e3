"""Code that Python runs at its start in a program that `s2o-run` started: it waits until transformers is imported.

Nothing is imported before the program imports it. A `sitecustomize` that this one hides runs as well.
"""

from __future__ import annotations

import atexit
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from os.path import abspath, dirname
from types import ModuleType
from typing import Any

AWAITED = "transformers.modeling_utils"  # what every model imports, and where attention functions are registered


class _Finder:
    """A finder of one module, which replaces SDPA once that has run."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != AWAITED:
            return None
        sys.meta_path.remove(_Finder)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                _replace_sdpa_after(spec.loader)
                return spec
        return None


def _replace_sdpa_after(loader: Any) -> None:
    """Replace SDPA once a loader has run a module; the module does not show it."""
    run = loader.exec_module

    def run_and_replace(module: ModuleType) -> None:
        loader.exec_module = run
        run(module)
        _replace_sdpa()

    loader.exec_module = run_and_replace


def _replace_sdpa() -> None:
    try:
        from s2o_runtime.huggingface.sdpa import replace_sdpa

        replace_sdpa()
    except Exception as error:  # the program must start, whatever is wrong here
        print(f"s2o-run: models run without S2O ({type(error).__name__}: {error})", file=sys.stderr)


def _say_if_awaited() -> None:
    """Say at the end of the process that `s2o-run` became that no model can have run, if so."""
    if AWAITED not in sys.modules and os.environ.get("S2O_STARTED") == str(os.getpid()):
        print(
            "s2o-run: no model of this program ran S2O in this process: it did not import transformers' models",
            file=sys.stderr,
        )


def _run_hidden() -> None:
    """Run the `sitecustomize` that Python would have found without this folder."""
    here = dirname(abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if abspath(folder) != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if AWAITED in sys.modules:
    _replace_sdpa()
else:
    sys.meta_path.insert(0, _Finder)
    atexit.register(_say_if_awaited)
_run_hidden()
