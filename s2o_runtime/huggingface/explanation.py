"""A table of what each layer of a patched model ran, why, how much of it was computed and how long it took."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..identity import geometry
from .layers import LayerState, check_model, list_states

COLUMNS = ("layer", "path", "calls", "density", "ms", "error", "last", "high", "reason")
OF_DRIFT = ("error", "last", "high")


class Explanation(list[dict[str, Any]]):
    """One row per layer, path and reason; printed, a table.

    A row has layer, path ("s2o" or "dense"), reason, calls; density: pairs computed over causal pairs, the mean over
    sampled calls and all heads, 1.0 for dense; ms: the mean milliseconds of sampled calls in the attention function;
    error, last: the running error of the drift check over what the profile allows, over all rows and over the last
    eighth of the prompt; high: the share of its last checks that was far above (`drift.DriftNumbers`). What is not
    known is None.
    others: how many layers the model has that have no full attention, in words; empty if there are none or if it is not
    known. Those of sliding or chunked attention have rows too.
    reads: which calls are dense because of what their callers read, in words; empty under a budget of all rows.
    """

    others: str = ""
    reads: str = ""

    def __str__(self) -> str:
        """The table, without the columns of the drift check where nothing was checked."""
        if not self:
            return "no attention layer was called"

        def show(value: Any) -> str:
            return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)

        names = [name for name in COLUMNS if name not in OF_DRIFT or any(row[name] is not None for row in self)]
        columns = [[name, *(show(row[name]) for row in self)] for name in names]
        widths = [max(map(len, column)) for column in columns]
        padded = [
            [cell.ljust(width) if name in ("path", "reason") else cell.rjust(width) for cell in column]
            for name, width, column in zip(names, widths, columns, strict=True)
        ]
        lines = ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]
        others = f"\nlayers of other kinds, which stay what they are: {self.others}" if self.others else ""
        return "\n".join(lines) + others + (self.reads and f"\n{self.reads}")

    __repr__ = __str__


def explain(model: nn.Module) -> Explanation:
    """Return what each layer of a patched model did so far. Raises ModelError if the model is not patched.

    Counts are of all calls, but for the replays of a CUDA graph, which no one sees; densities and times are of a few
    sampled ones. Waits for the device.

    >>> import torch
    >>> import s2o_runtime
    >>> from transformers import AutoModelForCausalLM
    >>> model = AutoModelForCausalLM.from_pretrained("calibrate/demo/model")  # in a clone of the repository
    >>> with s2o_runtime.patched(model, "profiles/demo/cpu/mse-0.0001.safetensors"), torch.no_grad():
    ...     _ = model(torch.arange(1100)[None] % 256)
    ...     [(row["layer"], row["path"], row["calls"]) for row in explain(model)][:2]
    [(0, 's2o', 1), (1, 's2o', 1)]
    """
    check_model(model)
    rows = explain_layers(list_states(model))
    rows.others = geometry(model.config).other_layers
    return rows


def explain_layers(states: Iterable[LayerState]) -> Explanation:
    """Return the same of layers wherever they are."""
    rows = Explanation()
    for state in states:
        rows.reads = rows.reads or state.reads
        measured = {} if state.meter is None else state.meter.read()
        drift = (state.drift.numbers() if state.drift else None) or (None,) * len(OF_DRIFT)
        for (path, reason), calls in sorted(state.counts.items()):
            density, seconds = measured.get((path, reason), (None, None))
            row = {"layer": state.layer, "path": path, "reason": reason, "calls": calls}
            row |= {"density": 1.0 if path == "dense" else density, "ms": None if seconds is None else seconds * 1e3}
            row |= zip(OF_DRIFT, drift if path == "s2o" else (None,) * len(OF_DRIFT), strict=True)
            rows.append(row)
    return rows
