#!/usr/bin/env python3
"""Time, density and error of S2O and of the baselines on the same q, k, v, and two boards of who is fastest.

    python -m scripts.bench.methods [--methods dense s2o pbs:keep=0.9 ...] [--profile FILE]
                                    [--chunks 2048,8192] [--turns 512,2048]

A method without options stands for a ladder of settings; "s2o" is S2O with one setting for all heads, "dense" every
dense kernel that is here, of which the fastest for the same calls is what methods are compared with. Each --profile is
S2O, calibrated. Settings are written as s2o-eval takes them. Every layer of the model is one call for all prompts of
the batch. Times are the GPU's, of all layers together, each call with a cold L2, all methods in turns; "selecting" is
ranking or choosing blocks. Errors are against float32 dense attention in sampled rows.

The boards have each method's fastest measured setting at a length, and the command that measures it again: at equal
error, for each of `ERRORS`; and under --chunks and --turns, for the settings of the first board and each method's
fastest: all queries so many at a time, and the last so many alone, as an agent's turn behind a cached prefix. Settings
at equal answers are those of scripts.bench.equal_answers.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibrate.curves.curves import compute_row_errors, select_worst
from calibrate.evaluation.plan import configure_layer, find_baseline, normalise_setting
from calibrate.proof.layers import configure_call
from calibrate.record import read_record
from calibrate.search.dense_kernels import Attention, list_dense_kernels
from calibrate.timing import sample_times
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.attention.backend import choose_backend
from s2o_runtime.call import Call
from s2o_runtime.config import LayerConfig
from s2o_runtime.devices import identify
from s2o_runtime.errors import InputError
from s2o_runtime.files import hash_file
from s2o_runtime.profile import Profile, load_profile
from s2o_runtime.reference.dense import dense_attention
from s2o_runtime.tiles import list_candidate_tiles
from scripts.bench import common
from scripts.bench.baselines.run import attend, baseline_attention, select
from scripts.bench.baselines.settings import BASELINES, Baseline
from scripts.bench.boards import candidates, print_boards, print_rows, text_of
from scripts.bench.calls import kernel_parts
from scripts.bench.inputs import Inputs, model_qkv
from scripts.bench.schema import CALIBRATED, DENSE_NAMES, ONE_SETTING, PROVEN, LayerRow, MethodRow, MethodsEntry, write
from scripts.bench.schema import MethodsFile as File

NAME = "scripts.bench.methods"
ERRORS = (0.001, 0.01, 0.03)  # rel_mse of the boards
SEED = 1234  # of the prompts
FLUSHES = 160  # some 5 ms of work ahead of a call: methods of many small operations are not charged for launching them
TAUS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
KEEPS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
ALPHAS = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
LADDERS: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {  # forms of a setting, and the numbers in them
    "s2o": (tuple(f"tau={{:g}},segment={of},tail=mean" for of in ("1024", "512,representatives=16")), TAUS),
    "flash-prefill": (("flash-prefill:alpha={:g}",), ALPHAS),
    "flash-prefill-v2": (("flash-prefill-v2:alpha={:g}", "flash-prefill-v2:alpha={:g},last=0,dense_layers=0"), ALPHAS),
    "flex-prefill": (("flex-prefill:keep={:g}", "flex-prefill:keep={:g},least_keys=128"), KEEPS),
    "pbs": (("pbs:keep={:g}",), KEEPS),
    "sparge": (("sparge:keep={:g},first=1", "sparge:keep={:g},similarity=0.2,first=1"), KEEPS),
    "xattention": (("xattention:keep={:g},first=1",), KEEPS),
}

Key = tuple[str, str]  # method and setting


@dataclass(frozen=True)
class MethodCall:
    """One setting of one method on one layer.

    attention: the whole call. measured: its output and the mean density of its heads. selection: the call's first part
    alone, if it has two.
    """

    attention: Callable[[], Tensor]
    measured: Callable[[], tuple[Tensor, float]]
    selection: Callable[[], Any] | None = None


Settings = dict[Key, Callable[[Inputs], MethodCall]]


def parser() -> common.Parser:
    out, add = common.bench_parser(NAME, __doc__)
    add("--methods", ("dense", "s2o", *BASELINES), "methods, or settings", nargs="+", metavar="NAME")
    add("--lengths", "8192,32768,131072", type=common.int_list("8192,32768"), metavar="N,N")
    add("--data", "demo", "the model to capture q, k, v of")
    out.add_argument("--profile", type=Path, action="append", default=[], help="for --data's model; repeatable")
    add("--chunks", (), "queries of a call, for the second board", type=common.int_list("2048,8192"), metavar="N,N")
    add("--turns", (), "last queries, for the same", type=common.int_list("512,2048"), metavar="N,N")
    add("--batch", 1, "prompts", type=int, metavar="N")
    add("--rounds", 3, "turns that are timed, after one that is not", type=int, metavar="N")
    common.add_machine(add, "bench_methods.json")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    return common.run_command(parser(), argv, measure, "shorter --lengths or a smaller --batch")


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    """Measure every length, print its boards, and write what there is so far to --out."""
    common.check_device(args)
    device = torch.device(args.device)
    profiles = {key_of(path): path for path in args.profile}
    settings = settings_of(args.methods, device)
    settings |= {key: partial(profile_call, load_profile(path)) for key, path in profiles.items()}
    options = {name: value for name, value in vars(args).items() if name != "out"}
    options["profile"] = [path.name for path in args.profile]
    file = File(settings=options, results=[], **common.machine(device))
    for length in args.lengths:
        entry = MethodsEntry(length, all_layers(args, settings, profiles, length))
        file.results.append(entry)
        print_rows(f"{length} tokens", entry.rows)
        chosen = {(row.method, row.setting) for row in candidates(entry.rows, ERRORS)}
        some = {key: call_of for key, call_of in settings.items() if key in chosen}
        for chunk, turn in [(chunk, None) for chunk in reversed(args.chunks)] + [(None, turn) for turn in args.turns]:
            if (chunk or turn) < length:
                write(args.out, file)
                entry.chunked.extend(all_layers(args, some, profiles, length, chunk, turn))
        write(args.out, file)
        print_boards(entry, ERRORS)


def measure_layer(inputs: Inputs, settings: Settings, rounds: int, chunk: int) -> dict[Key, LayerRow]:
    """Every setting on one layer, `chunk` queries at a time."""
    parts = inputs.chunks(chunk)
    pairs = [(2 * part.k.shape[2] - part.q.shape[2] + 1) * part.q.shape[2] / 2 for part in parts]
    rows: dict[Key, LayerRow] = {}
    jobs: dict[str, Callable[[], Any]] = {}
    for key, call_of in settings.items():
        calls = [call_of(part) for part in parts]
        try:
            outs, densities = zip(*(call.measured() for call in calls), strict=True)
        except RuntimeError as error:
            if key[0] not in DENSE_NAMES or isinstance(error, torch.OutOfMemoryError):
                raise
            print(f"{key[0]} does not take the call ({error}): it is left out", flush=True)
            continue
        out = torch.cat(outs, 2)[:, :, inputs.rows]
        worst = float(select_worst(compute_row_errors(out, inputs.exact).flatten()))
        mse = float((out.float() - inputs.exact).square().mean())
        relative = mse / float(inputs.exact.square().mean())
        density = sum(share * count for share, count in zip(densities, pairs, strict=True)) / sum(pairs)
        rows[key] = LayerRow(inputs.layer, density, mse, relative, worst, 0.0, 0.0)
        jobs[f"{key}"] = partial(in_turn, [call.attention for call in calls])
        if selections := [call.selection for call in calls if call.selection]:
            jobs[f"{key}, selecting"] = partial(in_turn, selections)
    times = sample_times(jobs, inputs.q.device, rounds, FLUSHES)
    seconds = {name: statistics.median(taken) for name, taken in times.items()}
    return {
        key: replace(row, seconds=seconds[f"{key}"], selecting_seconds=seconds.get(f"{key}, selecting", 0.0))
        for key, row in rows.items()
    }


def in_turn(jobs: Sequence[Callable[[], Any]]) -> None:
    for job in jobs:
        job()


def all_layers(
    args: argparse.Namespace, settings: Settings, profiles: Mapping[Key, Path], length: int, chunk: int | None = None,
    turn: int | None = None,
) -> list[MethodRow]:  # fmt: skip
    """A row for each setting: times are sums over the layers, errors and densities means, of worst rows the worst."""
    layers: dict[Key, list[LayerRow]] = {}
    layers_qkv = model_qkv(args.data, length, args.batch, SEED, torch.device(args.device))
    for index, (q, k, v) in enumerate(layers_qkv):
        inputs = Inputs.of((q[:, :, -(turn or length) :], k, v), SEED, index)
        for key, row in measure_layer(inputs, settings, args.rounds, chunk or length).items():
            layers.setdefault(key, []).append(row)
        print(f"{length} tokens, {turn or chunk or length} at a time: layer {index} measured", flush=True)
    dense = min((sum(row.seconds for row in layers[key]) for key in layers if key[0] in DENSE_NAMES), default=0.0)
    table = []
    for key, rows in layers.items():
        seconds, path = sum(row.seconds for row in rows), profiles.get(key)
        table.append(
            MethodRow(
                *key,
                seconds=seconds,
                selecting_seconds=sum(row.selecting_seconds for row in rows),
                speedup=dense / seconds if dense else None,
                density=statistics.fmean(row.density for row in rows),
                mse=statistics.fmean(row.mse for row in rows),
                rel_mse=statistics.fmean(row.rel_mse for row in rows),
                worst=max(row.worst for row in rows),
                layers=rows,
                profile=None if path is None else hash_file(path),
                chunk=chunk,
                turn=turn,
                command=command(args, key, path, {"lengths": length, "chunks": chunk, "turns": turn}),
            )
        )
    return table


def command(args: argparse.Namespace, key: Key, path: Path | None, sizes: Mapping[str, int | None]) -> str:
    """Return what measures one setting again at the sizes, by option, beside dense attention."""
    words = ["python", "-m", NAME, "--data", args.data, "--methods", "dense"]
    words += ["--profile", str(path)] if path else [] if key[0] in DENSE_NAMES else [text_of(*key)]
    words += [word for name, size in sizes.items() if size for word in (f"--{name}", str(size))]
    for name in ("batch", "rounds"):
        if (value := getattr(args, name)) != parser().get_default(name):
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def settings_of(methods: Sequence[str], device: torch.device) -> Settings:
    """The settings that `--methods` asks for."""
    settings: Settings = {}
    for name in methods:
        if name == "dense":
            kernels = zip(DENSE_NAMES, list_dense_kernels(device), strict=False)
            settings |= {(kernel, ""): partial(dense_call, attention=run) for kernel, run in kernels}
        else:
            forms, numbers = LADDERS.get(name, ((name,), (0.0,)))
            for text in (form.format(number) for form in forms for number in numbers):
                if baseline := find_baseline(text):
                    settings[baseline.name, text.partition(":")[2]] = partial(baseline_call, baseline)
                else:
                    settings[ONE_SETTING, normalise_setting(text)] = partial(text_call, text)
    return settings


def key_of(path: Path) -> Key:
    """Return what the bench calls a profile: its budget, its file and whether it was proven.

    Raises:
        InputError: the profile does not state its budget.
    """
    record = read_record(load_profile(path))
    if record.budget is None or record.budget.kind is None or record.budget.value is None:
        raise InputError(f"{path} does not say what its budget is: calibrate it again")
    proven = PROVEN if (record.proof or "").startswith("held out") else ""
    return CALIBRATED, f"{record.budget.kind} {record.budget.value:g} ({path.stem}){proven}"


def dense_call(inputs: Inputs, attention: Attention = dense_attention) -> MethodCall:
    call = partial(attention, inputs.q, inputs.k, inputs.v)
    return MethodCall(call, lambda: (call(), 1.0))


def baseline_call(baseline: Baseline, inputs: Inputs) -> MethodCall:
    if baseline.runs_dense(inputs.layer):
        return dense_call(inputs)
    q, k, v = inputs.q, inputs.k, inputs.v
    selection = partial(select, q, k, baseline)

    def measured() -> tuple[Tensor, float]:
        out, stats = baseline_attention(q, k, v, baseline)
        return out, float(stats.density.mean())

    return MethodCall(lambda: attend(q, k, v, selection()), measured, selection)


def text_call(text: str, inputs: Inputs) -> MethodCall:
    heads, head_dim, device = inputs.q.shape[1], inputs.q.shape[3], inputs.q.device
    tiles = list_candidate_tiles(head_dim, identify(device).capability) if device.type == "cuda" else ()
    return config_call(configure_layer(text, heads, tiles), inputs)


def profile_call(profile: Profile, inputs: Inputs) -> MethodCall:
    """As a server has it: by the whole prompt's length, below the shortest calibrated one dense."""
    if inputs.length < profile.min_length:
        return dense_call(inputs)
    return config_call(configure_call(profile, inputs.layer, inputs.length, inputs.k.shape[2]), inputs)


def config_call(config: LayerConfig, inputs: Inputs) -> MethodCall:
    """S2O with this config; its selection is the ranking."""
    q, k, v = inputs.q, inputs.k, inputs.v
    backend = choose_backend(Call.from_tensors(q, k, v, config), "auto").backend
    ranks = backend == "triton" and not config.is_dense

    def measured() -> tuple[Tensor, float]:
        result = s2o_attention(q, k, v, config, return_stats=True)
        return result.out, float(result.density.mean())

    selection = kernel_parts(q, k, v, [config])[0] if ranks else None
    return MethodCall(partial(s2o_attention, q, k, v, config), measured, selection)


if __name__ == "__main__":
    sys.exit(main())
