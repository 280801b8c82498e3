#!/usr/bin/env python3
"""Time, density and error of S2O and of the baselines on the same q, k, v.

    python -m scripts.bench.methods [--methods dense flash s2o published pbs:keep=0.9 ...] [--profile FILE]

A method without options stands for a ladder of settings. "s2o" is one tau for all heads, and each --profile;
"profiles" is the latter alone. With --budgets and --worst-rows also the profiles with these budgets and guards, made
from their journals: a layer that is then not faster than dense runs dense, as the calibrator would have it. "published"
is S2O as published. Every layer of the model is one call for all prompts of the batch. Times are the GPU's, of all
layers together, each call with a cold L2, all methods in turns; "selecting" is ranking or choosing blocks. Errors are
against float32 dense attention in sampled rows.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibrate.curves.row_errors import row_errors, worst_of
from calibrate.evaluation.variants import DIGEST
from calibrate.timing import samples
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.attention.backend import choose_backend
from s2o_runtime.baselines.run import attend, baseline_attention, select
from s2o_runtime.baselines.settings import BASELINES, Baseline, parse
from s2o_runtime.call import Call
from s2o_runtime.config import LayerConfig
from s2o_runtime.errors import InputError
from s2o_runtime.profile import Profile, load_profile
from s2o_runtime.profile.record import BudgetKind
from s2o_runtime.reference.dense import dense_attention
from scripts.bench.calls import device_tile, flash_attention, kernel_parts, published_config
from scripts.bench.common import (
    Parser,
    add_device,
    bench_parser,
    check_device,
    float_list,
    int_list,
    machine,
    run_command,
)
from scripts.bench.inputs import Inputs, file_qkv, model_qkv
from scripts.bench.schema import (
    CALIBRATED,
    DENSE,
    FLASH,
    ONE_TAU,
    PUBLISHED,
    LayerRow,
    MethodRow,
    MethodsEntry,
    MethodsFile,
    setting_name,
    write,
)

NAME = "scripts.bench.methods"
FLUSHES = 160  # some 5 ms of work ahead of a call: methods of many small operations are not charged for launching them
SEGMENT = 1024  # of S2O with one tau and as published
TAUS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
PUBLISHED_TAUS = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
KEEPS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
LADDERS: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {  # forms of a setting, and the numbers in them
    "flash-prefill": (("alpha={}",), (0.3, 0.12, 0.03, 0.01, 0.003, 0.001)),
    "pbs": (("keep={}",), KEEPS),
    "sparge": (("keep={},first=1", "keep={},similarity=0.2,first=1"), KEEPS),
    "xattention": (("keep={},first=1",), (0.7, 0.9, 0.95, 0.99)),
    "skip-softmax": (("factor={}", "factor={},block=64"), (100, 1000, 5000, 20000, 100000)),
}
DEFAULT = ("dense", "flash", "s2o", "published", *BASELINES)

Key = tuple[str, str]  # method and setting


@dataclass(frozen=True)
class LayerCall:
    """One setting of one method on one layer.

    attention: the whole call. density: measures the mean over the heads. selection: the call's first part alone,
    if it has two. dense_if_slower: dense attention replaces the call where it is not faster.
    """

    attention: Callable[[], Tensor]
    density: Callable[[], float]
    selection: Callable[[], Any] | None = None
    dense_if_slower: bool = False


Settings = dict[Key, Callable[[Inputs], LayerCall]]


def parser() -> Parser:
    out, add = bench_parser(NAME, __doc__)
    add("--methods", DEFAULT, "methods, or settings such as pbs:keep=0.9", nargs="+", metavar="NAME")
    add("--lengths", "8192,32768,131072", type=int_list("8192,32768"), metavar="N,N")
    add("--data", "demo", "a model to capture q, k, v of, or FILE.safetensors with q, k and v [B, H, L, D]")
    out.add_argument("--profile", type=Path, action="append", default=[], help="for --data's model; repeatable")
    out.add_argument("--journal", type=Path, help="of all profiles (default: where their calibration left it)")
    add("--budgets", (), "more budgets of the profile's kind", type=float_list("1e-4,1e-3"), metavar="X,X")
    guards = "guards on worst rows, besides the profile's; 0: none"
    add("--worst-rows", (), guards, type=float_list("0,0.8"), metavar="X,X")
    add("--batch", 1, "prompts", type=int, metavar="N")
    add("--rounds", 3, "turns that are timed, after one that is not", type=int, metavar="N")
    add("--error-rows", 256, "query rows, at random over the sequence", type=int, metavar="N")
    add("--seed", 1234, type=int, metavar="N")
    add_device(add)
    add("--out", Path("build/bench_methods.json"), type=Path, metavar="FILE")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run_command(NAME, args.out, lambda: measure(args), "shorter --lengths or a smaller --batch")


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    """Measure every length, print its table, and write what there is so far to --out."""
    check_device(args)
    device = torch.device(args.device)
    profiles, digests = calibrated(args), digests_of(args.profile)
    options = {name: value for name, value in vars(args).items() if name != "out"}
    options |= {"profile": [path.name for path in args.profile], "journal": args.journal and args.journal.name}
    file = MethodsFile(settings=options, results=[], **machine(device))
    for length in args.lengths:
        layers: dict[Key, list[LayerRow]] = {}
        for inputs in layer_inputs(args, length, device):
            settings = settings_of(args.methods, profiles, length, device)
            for key, row in measure_layer(inputs, settings, args.rounds).items():
                layers.setdefault(key, []).append(row)
        file.results.append(MethodsEntry(length, all_layers(layers, digests)))
        print_table(file.results[-1])
        write(args.out, file)


def layer_inputs(args: argparse.Namespace, length: int, device: torch.device) -> Iterator[Inputs]:
    """The calls of the layers that --data names, one after another."""
    if Path(args.data).suffix == ".safetensors":
        layers = file_qkv(Path(args.data), length, device)
    else:
        layers = model_qkv(args.data, length, args.batch, args.seed, device)
    for index, qkv in enumerate(layers):
        yield Inputs.of(qkv, args.error_rows, args.seed, index)


def measure_layer(inputs: Inputs, settings: Settings, rounds: int) -> dict[Key, LayerRow]:
    """Every setting on one layer."""
    calls = {key: call_of(inputs) for key, call_of in settings.items()}
    rows = {}
    for key, call in calls.items():
        out = call.attention()[:, :, inputs.rows]
        worst = float(worst_of(row_errors(out, inputs.exact).flatten()))
        mse = float((out.float() - inputs.exact).square().mean())
        relative = mse / float(inputs.exact.square().mean())
        rows[key] = LayerRow(inputs.layer, call.density(), mse, relative, worst, 0.0, 0.0)
    jobs: dict[str, Callable[[], Any]] = {f"{key}": call.attention for key, call in calls.items()}
    jobs |= {f"{key}, selecting": call.selection for key, call in calls.items() if call.selection}
    times = samples(jobs, inputs.q.device, rounds, FLUSHES)
    seconds = {name: statistics.median(taken) for name, taken in times.items()}
    timed = {
        key: replace(row, seconds=seconds[f"{key}"], selecting_seconds=seconds.get(f"{key}, selecting", 0.0))
        for key, row in rows.items()
    }
    return dense_where_slower(timed, calls)


def dense_where_slower(rows: dict[Key, LayerRow], calls: Mapping[Key, LayerCall]) -> dict[Key, LayerRow]:
    """The rows, with dense attention in place of calibrated layers that are not faster."""
    dense = rows.get((DENSE, ""))
    if dense is None:
        return rows
    slower = [key for key, call in calls.items() if call.dense_if_slower and rows[key].seconds >= dense.seconds]
    return rows | dict.fromkeys(slower, dense)


def all_layers(layers: Mapping[Key, list[LayerRow]], digests: Mapping[Key, str]) -> list[MethodRow]:
    """A row for each setting: times are sums over the layers, errors and densities means, of worst rows the worst."""
    dense = sum(row.seconds for row in layers.get((DENSE, ""), ()))
    table = []
    for (method, setting), rows in layers.items():
        seconds = sum(row.seconds for row in rows)
        table.append(
            MethodRow(
                method=method,
                setting=setting,
                seconds=seconds,
                selecting_seconds=sum(row.selecting_seconds for row in rows),
                speedup=dense / seconds if dense else None,
                density=statistics.fmean(row.density for row in rows),
                mse=statistics.fmean(row.mse for row in rows),
                rel_mse=statistics.fmean(row.rel_mse for row in rows),
                worst=max(row.worst for row in rows),
                layers=rows,
                profile=digests.get((method, setting)),
            )
        )
    return table


def settings_of(methods: Sequence[str], profiles: Mapping[Key, Profile], length: int, device: torch.device) -> Settings:
    """The settings that `--methods` asks for, at one length."""
    settings: Settings = {}
    for name in methods:
        if name == "dense":
            settings[DENSE, ""] = dense_call
        elif name == "flash":
            if device.type == "cuda":
                settings[FLASH, ""] = flash_call
        elif name in ("s2o", "profiles"):
            taus = TAUS if name == "s2o" else ()
            settings |= {(ONE_TAU, f"tau={tau:g}"): partial(one_tau_call, tau) for tau in taus}
            of_profiles = distinct(profiles, length).items()
            settings |= {key: partial(profile_call, profile, length) for key, profile in of_profiles}
        elif name == "published":
            settings |= {(PUBLISHED, f"tau={tau:g}"): partial(published_call, tau) for tau in PUBLISHED_TAUS}
        else:
            for text in ladder(name):
                settings[parse(text).name, text.partition(":")[2] or "default"] = partial(baseline_call, parse(text))
    return settings


def distinct(profiles: Mapping[Key, Profile], length: int) -> dict[Key, Profile]:
    """The profiles that differ at this length from all earlier ones of their method; not every guard has an effect."""
    first: dict[tuple[str, tuple[LayerConfig, ...]], tuple[Key, Profile]] = {}
    for key, profile in profiles.items():
        layers = tuple(profile.layer_config(index, length) for index in range(len(profile.layers[0])))
        first.setdefault((key[0], layers), (key, profile))
    return dict(first.values())


def ladder(name: str) -> list[str]:
    """A baseline's settings; a setting stands for itself."""
    forms, numbers = LADDERS.get(name, ((), ()))
    return [f"{name}:{form.format(number)}" for form in forms for number in numbers] or [name]


def dense_call(inputs: Inputs) -> LayerCall:
    return LayerCall(partial(dense_attention, inputs.q, inputs.k, inputs.v), lambda: 1.0)


def flash_call(inputs: Inputs) -> LayerCall:
    return LayerCall(partial(flash_attention, inputs.q, inputs.k, inputs.v), lambda: 1.0)


def baseline_call(baseline: Baseline, inputs: Inputs) -> LayerCall:
    q, k, v = inputs.q, inputs.k, inputs.v
    selection = partial(select, q, k, baseline)
    density = partial(baseline_attention, q, k, v, baseline)  # what a skip leaves out is known once attention ran
    return LayerCall(lambda: attend(q, k, v, selection()), lambda: float(density()[1].density.mean()), selection)


def one_tau_call(tau: float, inputs: Inputs) -> LayerCall:
    heads, tile = inputs.q.shape[1], device_tile(inputs.q.shape[3], inputs.q.device)
    config = LayerConfig.uniform(heads, tau=tau, segment=SEGMENT, tail=True, grain=4, tile=tile)
    return config_call(config, inputs)


def published_call(tau: float, inputs: Inputs) -> LayerCall:
    return config_call(
        published_config(inputs.q.shape[1], tau, SEGMENT, device_tile(inputs.q.shape[3], inputs.q.device)), inputs
    )


def profile_call(profile: Profile, length: int, inputs: Inputs) -> LayerCall:
    return replace(config_call(profile.layer_config(inputs.layer, length), inputs), dense_if_slower=True)


def config_call(config: LayerConfig, inputs: Inputs) -> LayerCall:
    """S2O with this config; its selection is the ranking."""
    q, k, v = inputs.q, inputs.k, inputs.v
    backend = choose_backend(Call.of(q, k, v, config), "auto").backend
    ranks = backend == "triton" and not config.is_dense
    return LayerCall(
        partial(s2o_attention, q, k, v, config),
        lambda: float(s2o_attention(q, k, v, config, return_stats=True).density.mean()),
        kernel_parts(q, k, v, [config])[0] if ranks else None,
    )


def calibrated(args: argparse.Namespace) -> dict[Key, Profile]:
    """The profiles that --profile names, and the same with the other budgets and guards."""
    from calibrate.profiles.rebudget import rebudget
    from calibrate.recipe import Budget

    profiles = {}
    for path in args.profile:
        profile = load_profile(path)
        kind, value = budget_of(path, profile)
        profiles[CALIBRATED, f"{setting_name(kind, value)}, proven"] = profile
        for budget, guard in product(sorted({value, *args.budgets}), (None, *args.worst_rows)):
            if (budget, guard) == (value, None):
                continue
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "profile.safetensors"
                rebudgeted = rebudget(path, Budget(kind, budget), out, args.journal, guard)
            profiles[CALIBRATED, setting_name(kind, budget, guard)] = rebudgeted
    return profiles


def digests_of(paths: Sequence[Path]) -> dict[Key, str]:
    """The digests of the files that --profile names, as s2o-eval writes them; other budgets are of no file."""
    digests = {}
    for path in paths:
        setting = f"{setting_name(*budget_of(path, load_profile(path)))}, proven"
        digests[CALIBRATED, setting] = hashlib.sha256(path.read_bytes()).hexdigest()[:DIGEST]
    return digests


def budget_of(path: Path, profile: Profile) -> tuple[BudgetKind, float]:
    """The kind and value of a profile's budget. Raises InputError if the profile does not state it."""
    budget = profile.record.budget
    if budget is None or budget.kind is None or budget.value is None:
        raise InputError(f"{path} does not say what its budget is: calibrate it again")
    return budget.kind, budget.value


def print_table(entry: MethodsEntry) -> None:
    print(f"{entry.length} tokens: method, setting, ms (selecting), against dense, density, rel_mse, worst row")
    for row in entry.rows:
        speedup = "-" if row.speedup is None else f"{row.speedup:.2f}x"
        print(
            f"  {row.method:24} {row.setting:32} {row.seconds * 1e3:9.2f} ({row.selecting_seconds * 1e3:6.2f})"
            f" {speedup:>7} {row.density:6.3f} {row.rel_mse:9.2e} {row.worst:8.2e}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
