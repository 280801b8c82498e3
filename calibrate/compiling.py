"""Compile kernels on several cores, before they are timed one by one."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

from calibrate.timing import FAILURES
from s2o_runtime.attention.warmup import THREADS
from s2o_runtime.config import LayerConfig, TileConfig


def compile_ahead(calls: Iterable[Callable[[], object]]) -> None:
    """Make calls concurrently, so that their kernels are compiled; their results are dropped.

    A call that fails here fails again where it is timed, and is reported there. Calls that need the same kernels would
    only compile them several times.
    """
    with start_compiling(calls) as finish:
        finish()


@contextmanager
def start_compiling(calls: Iterable[Callable[[], object]]) -> Iterator[Callable[[], None]]:
    """Make calls as `compile_ahead` does, concurrently with the block.

    Yields:
        A function that waits for the calls. Those that did not begin before the block ends are not made.
    """
    # threads share the work, because Triton leaves Python's lock while it compiles
    threads = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
    futures = [threads.submit(call) for call in calls]

    def finish() -> None:
        for future in futures:
            with suppress(*FAILURES):
                future.result()

    try:
        yield finish
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def with_tiles(config: LayerConfig, tiles: Iterable[TileConfig]) -> list[LayerConfig]:
    """Return the layer with each tile that has a kernel of its own: the stride of the stop check makes none."""
    first_of = {without_stride(tile): tile for tile in reversed(list(tiles))}
    return [config.with_tile(tile) for tile in reversed(first_of.values())]


def without_stride(tile: TileConfig) -> TileConfig:
    """Return the tile without the stride of its stop check."""
    return replace(tile, chunk=1)


def get_kernel_form(config: LayerConfig) -> Hashable:
    """Return all that decides, beside a layer's tile, about the kernels that it needs."""
    modes = frozenset(head.mode for head in config.heads)
    return modes, config.has_tail, config.last_rows > 0
