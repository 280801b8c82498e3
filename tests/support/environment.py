"""The profile of the environment, in tests that are no processes of their own."""

from contextlib import contextmanager

from s2o_runtime import logs
from s2o_runtime.huggingface import layers, run, sdpa


def forget():
    """Return what this process knows of S2O_PROFILE and of the models that got it."""
    logs.log_once.cache_clear()
    run._read.clear()
    run._candidates.clear()
    run.attached.clear()
    run.refused.clear()
    layers.paths_taken.clear()


@contextmanager
def under_s2o_run():
    """Replace SDPA as s2o-run does in the program that it starts, in this process."""
    sdpa.replace_sdpa()
    try:
        yield
    finally:
        sdpa.restore_sdpa()
