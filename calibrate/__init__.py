"""The calibrator: find how much of a model's attention can be skipped within an error budget, prove it, write it down.

    from calibrate import calibrate

    result = calibrate("demo", budget_rel_mse=1e-3, lengths=(1024, 2048), out="p.safetensors")

Names are loaded on first use, so that `import calibrate` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from s2o_runtime.lazy import load_lazily

if TYPE_CHECKING:
    from calibrate.api import calibrate
    from calibrate.pipeline import Result
    from calibrate.recipe import Budget, Recipe

__all__ = ["Budget", "Recipe", "Result", "calibrate"]

_HOMES = {"api": ("calibrate",), "pipeline": ("Result",), "recipe": ("Budget", "Recipe")}

__getattr__ = load_lazily(__name__, _HOMES)
