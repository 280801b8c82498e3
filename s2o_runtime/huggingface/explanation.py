"""Which path each layer of a patched model took, why, how much of it was computed and how long it took."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from s2o_runtime.huggingface.layers import LayerState, all_states, check_model
from s2o_runtime.identity import geometry

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
    """

    others: str = ""

    def __str__(self) -> str:
        """The table: left out is what the drift check found where nothing was checked."""
        if not self:
            return "no attention layer was called"
        columns = [name for name in COLUMNS if name not in OF_DRIFT or any(row[name] is not None for row in self)]
        cells = [columns, *([_cell(row[name]) for name in columns] for row in self)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        numeric = [name not in ("path", "reason") for name in columns]
        lines = (
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(line, widths, numeric, strict=True)
            )
            for line in cells
        )
        others = [f"layers of other kinds, which stay what they are: {self.others}"] if self.others else []
        return "\n".join([*(line.rstrip() for line in lines), *others])

    __repr__ = __str__


def explain(model: nn.Module) -> Explanation:
    """What each layer of a patched model did so far. Raises ModelError if the model is not patched.

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
    rows = explained(all_states(model))
    rows.others = geometry(model.config).other_layers
    return rows


def explained(states: Iterable[LayerState]) -> Explanation:
    """The same for layers wherever they are."""
    rows = Explanation()
    for state in states:
        measured = {} if state.meter is None else state.meter.read()
        drift = None if state.drift is None else state.drift.numbers()
        for key, calls in sorted(state.counts.items()):
            path, reason = key
            sampled = measured.get(key)
            rows.append(
                {
                    "layer": state.layer,
                    "path": path,
                    "reason": reason,
                    "calls": calls,
                    "density": 1.0 if path == "dense" else None if sampled is None else sampled.density,
                    "ms": None if sampled is None else sampled.seconds * 1e3,
                }
                | dict(zip(OF_DRIFT, drift if drift is not None and path == "s2o" else (None,) * 3, strict=True))
            )
    return rows


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
