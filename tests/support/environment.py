"""The profile of the environment, in tests that are no processes of their own."""

import atexit
from contextlib import contextmanager

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

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
        restore_sdpa()


def restore_sdpa():
    """Undo `sdpa.replace_sdpa`."""
    AttentionInterface.register(sdpa.NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(sdpa.NAME, sdpa_mask)
    if sdpa._replaced:
        AttentionInterface.register(sdpa.PAGED, sdpa._replaced.pop(sdpa.PAGED))
    atexit.unregister(sdpa._print_summary)
