#!/usr/bin/env python3
"""Every method in the same room: time, density and error of S2O and its rivals on the same q, k, v.

    python scripts/bench_attention.py --methods [dense flash s2o pbs:keep=0.9 ...] [--data demo] [--profile FILE]

A method without options stands for a ladder of settings. "s2o" is one tau for all heads, and each --profile (one
for each --method of s2o-calibrate); with --budgets and --worst-rows also the profiles with these budgets and guards,
made from their journals: a layer that is then not faster than dense runs dense, as the calibrator would have it.
Every layer of the model is one call for all prompts of the batch. Times are the GPU's, of all layers together, each
call with a cold L2, all methods in turns; "selecting" is ranking or choosing blocks. Errors are against float32 dense
attention in sampled rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from benching import (
    BY_METHOD,
    DENSE,
    METHODS,
    bench_parser,
    exact_rows,
    exit_code,
    machine,
    numbers,
    parsed,
    setting_of,
)

from calibrate.cli import Parser
from calibrate.timing import samples
from calibrate.worst import WORST, row_errors
from s2o_runtime.attention import choose_backend, s2o_attention
from s2o_runtime.baselines.run import attend, select
from s2o_runtime.baselines.settings import BASELINES, Baseline, parse
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.dense import dense_attention
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.gpu import default_tile, identify
from s2o_runtime.profile import Profile, load_profile
from s2o_runtime.shapes import call_shape

FLUSHES = 160  # some 5 ms of work ahead of a call: methods of many small operations are not charged for launching them
KEEPS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
LADDERS: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {  # forms of a setting, and what they are filled with
    "mean-pooling": (("keep={}",), (0.7, 0.9, 0.95, 0.99)),
    "pbs": (("keep={}",), KEEPS),
    "sparge": (("keep={}", "keep={},similarity=0.2"), KEEPS),
    "xattention": (("keep={}",), (0.7, 0.9, 0.95, 0.99)),
    "a-shape": (("sink=128,local={}",), (512, 2048, 8192)),
    "vertical-slash": (("vertical={0},slash={0}",), (256, 1024, 4096)),
}
TAUS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
DEFAULT = ("dense", "flash", "s2o", *BASELINES)


@dataclass(frozen=True)
class Inputs:
    """One layer's call: q [B, Hq, L, D], k, v [B, Hkv, L, D]; rows [R], and what exact attention gives there."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    rows: Tensor
    exact: Tensor


@dataclass(frozen=True)
class Way:
    """One setting of one method on one layer. whole: the call; density: of all heads; selecting: its first part alone,
    if it has two; never_slower: where it is slower than dense attention it is not used."""

    whole: Callable[[], Tensor]
    density: Callable[[], float]
    selecting: Callable[[], Any] | None = None
    never_slower: bool = False


Contender = tuple[str, str, Callable[[Inputs], Way]]  # method, setting, what it is on a layer


def parser() -> Parser:
    out, add = bench_parser("bench_methods", __doc__)
    lengths, budgets = (parsed(partial(numbers, number), "N,N") for number in (int, float))
    add("--methods", DEFAULT, "methods, or settings such as pbs:keep=0.9", nargs="*", metavar="NAME")
    add("--lengths", "8192,32768,131072", type=lengths, metavar="N,N")
    add("--data", "demo", "a model to capture q, k, v of, or FILE.safetensors with q, k and v [B, H, L, D]")
    out.add_argument("--profile", type=Path, action="append", default=[], help="for --data's model; repeatable")
    out.add_argument("--journal", type=Path, help="of all profiles (default: where their calibration left it)")
    add("--budgets", (), "more budgets of the profile's kind", type=budgets, metavar="X,X")
    add("--worst-rows", (), "guards on worst rows, besides the profile's; 0: none", type=budgets, metavar="X,X")
    add("--batch", 1, "prompts", type=int, metavar="N")
    add("--rounds", 3, "turns that are timed, after one that is not", type=int, metavar="N")
    add("--error-rows", 256, "query rows, at random over the sequence", type=int, metavar="N")
    add("--seed", 1234, type=int, metavar="N")
    add("--device", "cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    add("--out", Path("build/bench_methods.json"), type=Path, metavar="FILE.json")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    args.methods = args.methods or DEFAULT
    return exit_code("bench_methods", args.out, lambda: measure(args), "shorter --lengths or a smaller --batch")


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    """Measure every length, print its table, and write what there is so far."""
    device = torch.device(args.device)
    profiles = calibrated(args)
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    settings |= {"profile": [path.name for path in args.profile], "journal": args.journal and args.journal.name}
    record: dict[str, Any] = {"format": METHODS, **machine(device), "settings": settings, "results": []}
    for length in args.lengths:
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for inputs in layers(args, length, device):
            for key, row in on_layer(inputs, contenders(args.methods, profiles, length, device), args.rounds).items():
                found.setdefault(key, []).append(row)
        entry = {"length": length, "rows": [together(key, rows, found) for key, rows in found.items()]}
        record["results"].append(entry)
        print_table(entry)
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def on_layer(inputs: Inputs, some: Sequence[Contender], rounds: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Every contender on one layer. Times in seconds."""
    ways = {(method, setting): make(inputs) for method, setting, make in some}
    rows = {}
    for key, way in ways.items():
        out = way.whole()[:, :, inputs.rows]
        worst = torch.quantile(row_errors(out, inputs.exact).flatten(), WORST)
        squared = float((out.float() - inputs.exact).square().mean())
        errors = {"mse": squared, "rel_mse": squared / float(inputs.exact.square().mean()), "worst": float(worst)}
        rows[key] = {"layer": inputs.layer, "density": way.density(), **errors}
    jobs = {f"whole {i}": way.whole for i, way in enumerate(ways.values())}
    jobs |= {f"selecting {i}": way.selecting for i, way in enumerate(ways.values()) if way.selecting}
    seconds = {name: statistics.median(each) for name, each in samples(jobs, inputs.q.device, rounds, FLUSHES).items()}
    for i, row in enumerate(rows.values()):
        row |= {"seconds": seconds[f"whole {i}"], "selecting_seconds": seconds.get(f"selecting {i}", 0.0)}
    return of_calibrated(rows, ways)


def of_calibrated(
    rows: dict[tuple[str, str], dict[str, Any]], ways: dict[tuple[str, str], Way]
) -> dict[tuple[str, str], dict[str, Any]]:
    """The same, with dense attention in place of calibrated layers that are not faster."""
    dense = rows.get((DENSE, ""))
    slower = [
        key for key, way in ways.items() if way.never_slower and dense and rows[key]["seconds"] >= dense["seconds"]
    ]
    return rows | {key: dict(dense or {}) for key in slower}


def together(
    key: tuple[str, str], rows: list[dict[str, Any]], found: dict[tuple[str, str], list[dict[str, Any]]]
) -> dict[str, Any]:
    """All layers of one setting: times are sums, errors and densities means, of worst rows the worst."""

    def total(name: str, some: list[dict[str, Any]]) -> float:
        return sum(row[name] for row in some)

    seconds, dense = total("seconds", rows), found.get((DENSE, ""))
    return {
        "method": key[0],
        "setting": key[1],
        "seconds": seconds,
        "selecting_seconds": total("selecting_seconds", rows),
        "speedup": total("seconds", dense) / seconds if dense else None,
        **{name: total(name, rows) / len(rows) for name in ("density", "mse", "rel_mse")},
        "worst": max(row["worst"] for row in rows),
        "layers": rows,
    }


def contenders(
    names: Sequence[str], profiles: dict[tuple[str, str], Profile], length: int, device: torch.device
) -> list[Contender]:
    """What `--methods` asks for, at one length."""
    made: list[Contender] = []
    for name in names:
        if name == "dense":
            made.append((DENSE, "", dense))
        elif name == "flash":
            if device.type == "cuda":
                made.append(("dense (FlashAttention-2)", "", flash))
        elif name == "s2o":
            made += [("S2O, one tau", f"tau={tau:g}", partial(uniform, tau)) for tau in TAUS]
            made += [(*key, partial(profiled, each, length)) for key, each in different(profiles, length).items()]
        else:
            made += [(parse(text).name, shown(text), partial(blocks, parse(text))) for text in ladder(name)]
    return made


def different(profiles: dict[tuple[str, str], Profile], length: int) -> dict[tuple[str, str], Profile]:
    """Those that do at this length what none before them of the same method does: not every guard changes something."""
    found = {}
    for (method, setting), profile in profiles.items():
        layers = tuple(profile.layer_config(index, length) for index in range(len(profile.layers[0])))
        found.setdefault((method, layers), ((method, setting), profile))
    return dict(found.values())


def ladder(name: str) -> list[str]:
    """A method's settings; a setting stands for itself."""
    forms, values = LADDERS.get(name, ((), ()))
    return [f"{name}:{form.format(value)}" for form in forms for value in values] or [name]


def shown(text: str) -> str:
    return text.partition(":")[2] or "default"


def dense(inputs: Inputs) -> Way:
    return Way(partial(dense_attention, inputs.q, inputs.k, inputs.v), lambda: 1.0)


def flash(inputs: Inputs) -> Way:
    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                inputs.q, inputs.k, inputs.v, is_causal=True, enable_gqa=True
            )

    return Way(run, lambda: 1.0)


def blocks(settings: Baseline, inputs: Inputs) -> Way:
    q, k, v = inputs.q, inputs.k, inputs.v

    def run() -> Tensor:
        return attend(q, k, v, select(q, k, settings))

    choosing = partial(select, q, k, settings)
    return Way(run, lambda: float(choosing().density.mean()), choosing)


def uniform(tau: float, inputs: Inputs) -> Way:
    tile = TileConfig(64, 64, 4)
    if inputs.q.is_cuda:
        tile = default_tile(inputs.q.shape[3], identify(inputs.q.device).capability)
    config = LayerConfig.uniform(inputs.q.shape[1], tau=tau, segment=1024, tail=True, grain=4, tile=tile)
    return of_config(config, inputs)


def profiled(profile: Profile, length: int, inputs: Inputs) -> Way:
    return replace(of_config(profile.layer_config(inputs.layer, length), inputs), never_slower=True)


def of_config(config: LayerConfig, inputs: Inputs) -> Way:
    q, k, v = inputs.q, inputs.k, inputs.v
    backend = choose_backend(q, k, v, config, call_shape(q, k, v), "auto").backend
    steps: list[Callable[[], Any]] = []
    if backend == "triton" and any(head.mode == "s2o" for head in config.heads):
        from bench_attention import kernel_parts

        steps.append(kernel_parts(q, k, v, [config])["rank"])
    for settings in dict.fromkeys(head.blocks for head in config.heads if head.blocks is not None):
        heads = [index for index, head in enumerate(config.heads) if head.blocks == settings]
        steps.append(partial(select, q, k, settings, heads=heads))
    return Way(
        partial(s2o_attention, q, k, v, config),
        lambda: float(s2o_attention(q, k, v, config, return_stats=True)[1].density.mean()),
        (lambda: [step() for step in steps]) if steps else None,
    )


def calibrated(args: argparse.Namespace) -> dict[tuple[str, str], Profile]:
    """The profiles and the same with other budgets, by method and budget."""
    from calibrate.rebudget import rebudget
    from calibrate.recipe import Budget

    found = {}
    for path in args.profile:
        profile = load_profile(path)
        kind, value = (profile.record["budget"][name] for name in ("kind", "value"))
        method = BY_METHOD[profile.record["recipe"].get("method", "s2o")]
        found[method, f"{setting_of(kind, value)}, proven"] = profile
        for budget, guard in product(sorted({value, *args.budgets}), (None, *args.worst_rows)):
            if (budget, guard) == (value, None):
                continue
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "profile.safetensors"
                made = rebudget(path, Budget(kind, budget), out, args.journal, guard).profile
            found[method, setting_of(kind, budget, guard)] = made
    return found


def layers(args: argparse.Namespace, length: int, device: torch.device) -> Iterator[Inputs]:
    """The layers' calls, one after another."""
    source = from_file if Path(args.data).suffix == ".safetensors" else captured
    for index, (q, k, v) in enumerate(source(args, length, device)):
        rows, exact = exact_rows(q, k, v, args.error_rows, args.seed)
        yield Inputs(index, q, k, v, rows, exact)


def from_file(args: argparse.Namespace, length: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v of a file, or its layers' "0.q", "0.k", "0.v", "1.q", ..., cut to `length`."""
    from safetensors import SafetensorError, safe_open

    try:
        opened = safe_open(args.data, "pt")
    except (OSError, SafetensorError) as error:
        raise InputError(f"{args.data} cannot be read ({error}): give a safetensors file with q, k and v") from error
    with opened as file:
        names = set(file.keys())
        prefixes = sorted({name[:-1] for name in names if name[-1] in "qkv"}, key=lambda text: (len(text), text))
        if not prefixes or any(f"{prefix}{part}" not in names for prefix in prefixes for part in "qkv"):
            raise InputError(f"{args.data} holds {sorted(names)[:6]}: expected q, k and v, or 0.q, 0.k, 0.v, 1.q, ...")
        for prefix in prefixes:
            parts = [file.get_tensor(f"{prefix}{part}") for part in "qkv"]
            if parts[0].shape[2] < length:
                raise ConfigError(f"{args.data} holds {parts[0].shape[2]} tokens: use --lengths up to that")
            yield tuple(part[:, :, :length].to(device) for part in parts)  # type: ignore[misc]


def captured(args: argparse.Namespace, length: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v of every layer of a model that reads prompts calibration has not seen."""
    from calibrate.capture import layers as of_model
    from calibrate.models import load, load_config
    from calibrate.prompts import built_in

    limit = int(load_config(args.data).max_position_embeddings)
    if length > limit:
        raise ConfigError(f"length {length} is beyond the model's limit of {limit}: use a shorter one")
    loaded = load(args.data, args.device)
    ids = [prompt.ids for prompt in built_in(loaded.tokenizer, length, args.batch, args.seed, held_out=True)]
    for prompts in of_model(loaded, ids):
        batch = list(prompts)
        yield tuple(torch.cat([getattr(prompt, name) for prompt in batch]) for name in "qkv")  # type: ignore[misc]


def print_table(entry: dict[str, Any]) -> None:
    print(f"{entry['length']} tokens: method, setting, ms (selecting), against dense, density, rel_mse, worst row")
    for row in entry["rows"]:
        speedup = "-" if row["speedup"] is None else f"{row['speedup']:.2f}x"
        whole, selecting = row["seconds"] * 1e3, row["selecting_seconds"] * 1e3
        print(
            f"  {row['method']:24} {row['setting']:32} {whole:9.2f} ({selecting:6.2f})"
            f" {speedup:>7} {row['density']:6.3f} {row['rel_mse']:9.2e} {row['worst']:8.2e}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
