#!/usr/bin/env python3
"""Whole calibrations of models in published sizes with random weights: how long, how much GPU memory, does it hold.

    python -m scripts.bench.rehearsals [--models gemma-3-12b,gpt-oss-20b,qwen3-30b-a3b,qwen2.5-7b:nf4] [--lengths 16384]

Nothing is downloaded: sizes are those of calibrate/architectures, weights are drawn on the device, and prompts are of
the built-in text in the demo model's tokens. A model named with ":nf4" is then quantised to 4 bits by bitsandbytes, as
transformers does it while loading. Each model is calibrated from memory, self-test and certificate included; its
profile is patched in, and one prompt runs through it dense and with S2O. Random weights attend evenly, which leaves
little to skip: densities are no trained model's, so a budget of 1e-2 is the default here. A model that fails is
recorded with its reason, and the others go on.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibrate import calibrate
from calibrate.evaluation.variants import Variant, running
from calibrate.model.models import ALIASES, load_config, load_tokenizer
from calibrate.model.predictions import Agreement, agreement, timed_prefill
from calibrate.model.weights import RandomWeights, Weights, skeleton
from calibrate.pipeline import Result
from calibrate.progress import PhaseClock
from calibrate.recipe import SEGMENTS
from s2o_runtime import explain, patched
from s2o_runtime.errors import ConfigError, S2OError
from s2o_runtime.identity import geometry
from s2o_runtime.layer_kinds import layer_kinds
from scripts.bench.common import (
    BAD_INPUT,
    add_device,
    bench_parser,
    check_device,
    check_least,
    checked,
    int_list,
    machine,
    run_command,
)
from scripts.bench.schema import RehearsalFile, RehearsalRow, RehearsalRun, RehearsedLength, write

NAME = "scripts.bench.rehearsals"
MODELS = "gemma-3-12b,gpt-oss-20b,qwen3-30b-a3b,qwen2.5-7b:nf4"
NF4 = "nf4"
OTHERS = ("transformers", "bitsandbytes")  # packages whose versions are recorded too
COMPARED = 512  # the last positions of the prompt, whose predictions are compared
TINY = {  # sizes that a CPU runs in seconds; what makes the architecture what it is stays
    "hidden_size": 128,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 4096,
    "sliding_window": 128,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_LAYERS = 2


def parser() -> argparse.ArgumentParser:
    out, add = bench_parser(NAME, __doc__)
    add("--models", MODELS.split(","), "aliases of s2o-calibrate, with :nf4 in 4 bits", type=checked(_models, MODELS))
    add("--lengths", (16384,), type=int_list("16384"), metavar="N,N")
    add("--layers", None, "decoder layers of each model instead of its own", type=int, metavar="N")
    add("--num-prompts", 2, "prompts of each length to calibrate on, and as many to adjust on", type=int, metavar="N")
    add("--num-certify", 9, "prompts of each length to certify on", type=int, metavar="N")
    add("--trials", 8, "trials for each group of like layers", type=int, metavar="N")
    add("--budget-rel-mse", 1e-2, type=float, metavar="X")
    add("--seed", 0, type=int, metavar="N")
    out.add_argument("--tiny", action="store_true", help="small sizes, two layers (six of Gemma 3): for a CPU")
    add_device(add)
    add("--out", Path("build/rehearsals.json"), type=Path, metavar="FILE")
    return out


def _models(text: str) -> list[str]:
    names = text.split(",")
    if any(suffix not in ("", NF4) for _, _, suffix in (name.partition(":") for name in names)):
        raise ValueError(text)
    return names


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    rows: list[RehearsalRow] = []
    code = run_command(NAME, args.out, lambda: rows.extend(rehearse_all(args)), "shorter --lengths")
    return code or (BAD_INPUT if any(row.failed for row in rows) else 0)


def rehearse_all(args: argparse.Namespace) -> list[RehearsalRow]:
    """Rehearse every model, and write what there is so far to --out."""
    check_device(args)
    check_least(args, 1, "num_prompts", "num_certify", "trials")
    for name in args.models:
        if name.partition(":")[0] not in ALIASES:
            raise ConfigError(f"model {name!r} is not known: use some of {', '.join(sorted(ALIASES))}")
        sized(load_config(name.partition(":")[0], random_weights=True), args)
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    here = machine(torch.device(args.device))
    here["versions"] |= {name: text for name in OTHERS if (text := installed(name)) is not None}
    file = RehearsalFile(settings=settings, rows=[], **here)
    for name in args.models:
        print(f"rehearsing {name}", flush=True)
        file.rows.append(rehearsed(name, args))
        print_row(file.rows[-1])
        write(args.out, file)
        release()
    return file.rows


def installed(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def rehearsed(name: str, args: argparse.Namespace) -> RehearsalRow:
    """Draw, calibrate and run one model."""
    config = sized(load_config(name.partition(":")[0], random_weights=True), args)
    row = RehearsalRow(
        model=name,
        layers=dict(Counter(layer_kinds(config))),
        published_layers=load_config(name.partition(":")[0], random_weights=True).num_hidden_layers,
    )
    stages = Stages(torch.device(args.device))
    try:
        row.architecture = str(geometry(config))
        _rehearse(row, config, stages, args)
    except S2OError as error:
        row.failed = str(error)
    except torch.OutOfMemoryError as error:
        row.failed = f"the GPU's memory ran out: {str(error).splitlines()[0]}"
    row.seconds, row.peak_bytes = stages.clock.seconds, stages.peaks
    return row


def _rehearse(row: RehearsalRow, config: Any, stages: Stages, args: argparse.Namespace) -> None:
    name, _, quantised = row.model.partition(":")
    with stages.stage("weights"):
        model = drawn(config, args)
        row.parameters = sum(parameter.numel() for parameter in model.parameters())
        row.weights = str(model.dtype).removeprefix("torch.")
    if quantised:
        with stages.stage("quantising"):
            model = in_nf4(model, torch.device(args.device))
            row.weights = f"{NF4}, bitsandbytes"
    row.weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    tokenizer = load_tokenizer(name, random_weights=True)
    model.config._name_or_path = row.model
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "p.safetensors"
        with stages.stage("calibration"):
            result = calibrate(model, tokenizer, out=out, progress=not args.tiny, **options(args))
        stages.clock.seconds |= {f"calibration, {phase}": taken for phase, taken in result.seconds.items()}
        row.met, row.problems = result.met, list(result.problems)
        row.lengths = [_length(result, length) for length in args.lengths]
        with stages.stage("run"):
            row.run = run(model, out, max(args.lengths), args)


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the calibration; its profile is written whatever the proof says."""
    chosen: dict[str, Any] = {"num_held_out": args.num_prompts, "check_lengths": (), "allow_regression": True}
    chosen |= {name: getattr(args, name) for name in ("lengths", "num_prompts", "num_certify", "trials", "seed")}
    if args.tiny:
        chosen |= {"segments": (64, 128), "representatives": (1,), "worst_rows": 0}
    else:
        chosen["segments"] = tuple(segment for segment in SEGMENTS if segment <= min(args.lengths) // 2)
    return chosen | {"budget_rel_mse": args.budget_rel_mse}


def sized(config: Any, args: argparse.Namespace) -> Any:
    """The configuration with the layers that were asked for, and small with --tiny."""
    sizes: dict[str, Any] = {}
    if args.tiny:
        sizes = {name: value for name, value in TINY.items() if getattr(config, name, None) is not None}
        pattern = getattr(config, "layer_types", None) or ["full_attention"]
        sizes["num_hidden_layers"] = max(TINY_LAYERS, pattern.index("full_attention") + 1)
    if args.layers is not None:
        sizes["num_hidden_layers"] = args.layers
    if not sizes:
        return config
    layers = sizes.get("num_hidden_layers", config.num_hidden_layers)
    if layers > config.num_hidden_layers:
        raise ConfigError(f"--layers {layers} is more than the {config.num_hidden_layers} of a model: use fewer")
    if getattr(config, "layer_types", None):
        sizes["layer_types"] = list(config.layer_types)[:layers]
    return type(config).from_dict(config.to_dict() | sizes)


def drawn(config: Any, args: argparse.Namespace) -> Any:
    """The model with weights that are drawn on the device."""
    device = torch.device(args.device)
    model = skeleton(config, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    Weights(model, RandomWeights(model, args.seed), device, resident=True)
    return model


def in_nf4(model: Any, device: torch.device) -> Any:
    """The model as transformers and bitsandbytes quantise it while they load it.

    Raises:
        ConfigError: bitsandbytes or accelerate is not installed.
    """
    from transformers import BitsAndBytesConfig

    for package in ("bitsandbytes", "accelerate"):
        if find_spec(package) is None:
            raise ConfigError(f"4 bits need {package}, which is not installed: run pip install {package}")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=NF4, bnb_4bit_compute_dtype=model.dtype)
    quantised = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=model.state_dict(),
        quantization_config=settings,
        device_map={"": str(device)},
        dtype=model.dtype,
    )
    return quantised.eval().requires_grad_(False)


def run(model: Any, profile: Path, length: int, args: argparse.Namespace) -> RehearsalRun:
    """One prompt of random tokens through the model, dense and patched."""
    ids = torch.randint(len(load_tokenizer("demo")), (length,), generator=torch.Generator().manual_seed(args.seed))
    with running(model, Variant("", "")):
        dense_seconds, dense = timed(model, ids)
    with patched(model, profile, strict=True, drift="off"):
        seconds, sparse = timed(model, ids)
        rows = explain(model)
    compared = Agreement(*(part.cpu() for part in agreement(dense, sparse)))
    return RehearsalRun(
        length=length,
        dense_seconds=dense_seconds,
        seconds=seconds,
        kl=float(compared.kl.mean()),
        top1=float(compared.same.double().mean()),
        paths=[[row["layer"], row["path"], row["reason"]] for row in rows],
    )


@torch.no_grad()
def timed(model: Any, ids: Tensor) -> tuple[float, Tensor]:
    """Seconds of a prefill behind a first one, and log-probabilities [R, V] of its last positions."""
    given = ids[None].to(next(model.parameters()).device)
    logits = model(input_ids=given, use_cache=False, logits_to_keep=min(COMPARED, len(ids))).logits[0]
    return timed_prefill(model, ids, use_cache=False), logits.float().log_softmax(-1)


def _length(result: Result, length: int) -> RehearsedLength:
    """What the proof and the certificate say of one length."""
    proof, certificate = result.proofs[length], result.certificates.get(length)
    configs = [result.candidate.layer_config(layer, length) for layer in range(len(proof.layers))]
    bounds = [layer.bound for layer in certificate.layers if layer.bound is not None] if certificate else []
    return RehearsedLength(
        length=length,
        s2o_layers=sum(not config.is_dense for config in configs),
        density=sum(layer.density for layer in proof.layers) / len(proof.layers),
        density_of_layers=[layer.density for layer in proof.layers],
        rel_mse_of_layers=[layer.rel_mse for layer in proof.layers],
        kl=proof.kl,
        prefill_seconds=proof.prefill_seconds,
        dense_prefill_seconds=proof.dense_prefill_seconds,
        certified=certificate is not None and result.met,
        certify_prompts=certificate.prompts if certificate else 0,
        largest_bound=max(bounds, default=None),
        next_kl=certificate.kl.value if certificate else None,
    )


class Stages:
    """What each stage of a rehearsal took, in seconds by the clock, and the most GPU memory that was in use in it.

    Args:
        device: Where it runs; on a CPU no memory is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock, self.device = PhaseClock(), device
        self.peaks: dict[str, int] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block, also if it fails."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            with self.clock.phase(name):
                yield
                if on_gpu:
                    torch.cuda.synchronize(self.device)
        finally:
            if on_gpu:
                self.peaks[name] = torch.cuda.max_memory_allocated(self.device)


def release() -> None:
    """Give back what the last model took."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def print_row(row: RehearsalRow) -> None:
    """What a row says, in a few lines."""
    print(f"{row.model}: {row.architecture}; {row.parameters / 1e9:.2f} billion parameters ({row.weights})")
    print(f"  {_listed(row.seconds, lambda taken: f'{taken:.1f} s')}")
    print(f"  peak memory: {_listed(row.peak_bytes, lambda peak: f'{peak / (1 << 30):.1f} GiB')}")
    for entry in row.lengths:
        print(
            f"  {entry.length} tokens: {entry.s2o_layers} layers run S2O, density {entry.density:.3f}, "
            f"{'certified' if entry.certified else 'not certified'} on {entry.certify_prompts} prompts"
        )
    if row.run is not None:
        paths = Counter(f"{path} ({reason})" if reason else path for _, path, reason in row.run.paths)
        print(f"  a prompt: dense {row.run.dense_seconds:.3f} s, patched {row.run.seconds:.3f} s, KL {row.run.kl:.1e}")
        print(f"  {_listed(paths, str)}")
    for problem in (*row.problems, *([row.failed] if row.failed else [])):
        print(f"  {problem}")
    sys.stdout.flush()


def _listed(values: Mapping[str, Any], shown: Any) -> str:
    return ", ".join(f"{name} {shown(value)}" for name, value in values.items()) or "-"


if __name__ == "__main__":
    sys.exit(main())
