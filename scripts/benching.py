"""What the benchmarks of this folder share: options, where they ran, taus for a density, exact rows, failures."""

from __future__ import annotations

import argparse
import platform
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from calibrate.cli import BAD_INPUT, OK, Parser
from calibrate.versions import now
from s2o_runtime.config import LayerConfig
from s2o_runtime.errors import ConfigError, S2OError
from s2o_runtime.gpu import identify

# formats of what the benches write and results.py reads, and their names of what is compared
ATTENTION, METHODS, PREFILL = "s2o-bench-attention/1", "s2o-bench-methods/1", "s2o-bench-prefill/1"
DENSE = "dense (cuDNN)"
BY_METHOD = {  # of s2o-calibrate's --method
    "s2o": "S2O, calibrated",
    "pbs": "PBS-Attn, calibrated",
    "sparge": "SpargeAttn, calibrated",
    "auto": "the cheapest for each head, calibrated",
}
LOG2_TAU = (-30.0, 19.9)  # where tau is searched, up to MAX_TAU: the most peaked heads need the low end


def setting_of(kind: str, budget: float, guard: float | None = None) -> str:
    """What the methods' bench calls a calibrated setting; guard: on worst rows, where it is not the profile's own."""
    return f"{kind} {budget:g}" + ("" if guard is None else f", rows {guard:g}")


def bench_parser(name: str, doc: str | None) -> tuple[Parser, Callable[..., None]]:
    """A parser, and what adds an option to it whose help says its default: add(name, default, help, **kind)."""
    raw = argparse.RawDescriptionHelpFormatter
    out = Parser(name, description=doc, formatter_class=raw, epilog="Exit codes: 0 done, 2 bad input.")

    def add(name: str, default: Any = None, help: str = "", **kind: Any) -> None:
        out.add_argument(name, default=default, help=f"{help} (default %(default)s)".strip(), **kind)

    return out, add


def machine(device: torch.device) -> dict[str, Any]:
    """When, on what and with which versions something was measured."""
    return {
        "date": now(),
        "device": asdict(identify(device)),
        "versions": {name: str(import_module(name).__version__) for name in ("torch", "triton")},
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }


def exit_code(tool: str, out: Path, work: Callable[[], None], smaller: str) -> int:
    """Do `work`, which writes `out`, and say so; a failure is one sentence. smaller: what helps if memory runs out."""
    try:
        if out.is_dir():
            raise ConfigError(f"--out {out} is a folder: give a file name")
        out.parent.mkdir(parents=True, exist_ok=True)
        work()
    except S2OError as error:
        problem = str(error)
    except ModuleNotFoundError as error:
        problem = f"{error.name} is not installed: run pip install -e '.[calibrate,dev]'"
    except torch.OutOfMemoryError:
        problem = f"the GPU's memory is too small for these sizes: use {smaller}"
    except OSError as error:
        problem = f"{error.filename} cannot be written ({error.strerror}): give another --out"
    else:
        print(f"wrote {out}")
        return OK
    print(f"{tool}: {problem}", file=sys.stderr)
    return BAD_INPUT


def bisect(config: LayerConfig, target: float, steps: int, density: Callable[[LayerConfig], Tensor]) -> LayerConfig:
    """The config with the taus that bring each head's density [Hq] nearest to `target`, all heads at once."""
    low, high = (torch.full((config.num_heads,), edge, dtype=torch.float64) for edge in LOG2_TAU)
    nearest, best = torch.full_like(low, float("inf")), low
    for _ in range(steps):
        middle = (low + high) / 2
        reached = density(with_taus(config, middle.exp2().tolist()))
        distance = (reached / target).log().abs()
        best, nearest = torch.where(distance < nearest, middle, best), torch.minimum(distance, nearest)
        low, high = torch.where(reached > target, middle, low), torch.where(reached > target, high, middle)
    return with_taus(config, best.exp2().tolist())


def spread(seconds: list[float]) -> dict[str, float]:
    at = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    return dict(zip(("p25", "median", "p75"), torch.tensor(seconds).double().quantile(at).tolist(), strict=True))


def exact_rows(q: Tensor, k: Tensor, v: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices [R] of rows, one at random in each of `count` equal parts, and dense attention there in float32."""
    length, rng = q.shape[2], random.Random(seed)
    parts = pairwise(sorted({length * part // count for part in range(count + 1)}))
    rows = torch.tensor([rng.randrange(begin, end) for begin, end in parts], device=q.device)
    hidden = torch.arange(length, device=q.device) > rows[:, None]
    exact = torch.empty(*q.shape[:2], len(rows), q.shape[3], device=q.device)
    for h in range(q.shape[1]):
        keys, values = (t[:, h // (q.shape[1] // k.shape[1])].float() for t in (k, v))
        scores = q[:, h, rows].float() * q.shape[3] ** -0.5 @ keys.transpose(1, 2)
        exact[:, h] = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values
    return rows, exact


def rel_mse(o: Tensor, exact: Tensor) -> float:
    """mean((o - exact)^2) / mean(exact^2)"""
    return float((o.float() - exact).square().mean() / exact.square().mean())


def numbers(number: type[int] | type[float], text: str) -> tuple[float, ...]:
    return tuple(sorted({number(part) for part in text.split(",")}))


def parsed(parse: Callable[[str], Any], example: str) -> Callable[[str], Any]:
    def checked(text: str) -> Any:
        try:
            return parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not understood: try {example}") from None

    return checked


def with_taus(config: LayerConfig, taus: list[float]) -> LayerConfig:
    """The config with these taus, one for each head."""
    return replace(config, heads=tuple(replace(head, tau=tau) for head, tau in zip(config.heads, taus, strict=True)))
