#!/usr/bin/env python3
"""The time to the first token of vLLM's whole engine, its stock backend against S2O.

    python -m scripts.bench.first_token --model demo --profile profiles/demo/nvidia-h200/rel-mse-0.001.safetensors
    python -m scripts.bench.first_token --model llama-3.1-8b --density 0.25

Each engine runs in a process of its own, one after the other, because vLLM keeps the GPU's memory. Both read the same
prompts, one at a time, in chunks, with the prefix cache off, without CUDA graphs and torch.compile, and S2O without its
drift check. The first prompts of a length are not counted: they may include compiling, and S2O records launches in the
second to the fourth of like calls, to replay them from then on.

With --density vLLM draws weights for the model's sizes, prompts are random tokens, and the profile is written here.
Random weights attend nearly evenly, so one tau for all heads has them compute about that share of the keys before a
segment; a segment's own keys are always computed. Their answers say nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import torch

from calibrate.model.models import load_config, load_tokenizer, resolve
from calibrate.prompts.stdlib import first_tokens, sources
from s2o_runtime.config import HeadConfig, LayerConfig
from s2o_runtime.devices import identify
from s2o_runtime.errors import ConfigError, ResourceError, S2OError
from s2o_runtime.identity import geometry
from s2o_runtime.profile import Profile, load_profile, save_profile
from scripts.bench import common
from scripts.bench.calls import device_tile
from scripts.bench.schema import ResultFile, Spread, write

NAME = "scripts.bench.first_token"
STOCK, S2O = "stock", "S2O"
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the counters are in the engine's process
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # a prompt of the longest length, and its answer
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # would be compiled at the first prompt, by a compiler that may be missing
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class FirstTokens:
    """One engine at one length. first_seconds: of the first prompt. answers: the first token after each prompt."""

    engine: str
    length: int
    seconds: Spread
    first_seconds: float
    answers: list[int]


@dataclass(frozen=True, kw_only=True)
class FirstTokenFile(ResultFile):
    """What both engines, or one of them, did. settings: the options.

    summary: where S2O's query rows went, and why. density: of each layer's last sampled call, by the layer's number;
    few prompts have but one, the first.
    """

    program: ClassVar[str] = f"python -m {NAME}"

    format: str = "s2o-bench-first-token/1"
    settings: dict[str, Any]
    rows: list[FirstTokens]
    summary: str
    density: dict[str, float]


def parser() -> common.Parser:
    out, add = common.bench_parser(NAME, __doc__)
    add("--model", "demo", "alias, folder or hub id; with --density an alias or folder whose sizes are taken")
    add("--profile", help="the model's profile", type=Path, metavar="FILE")
    add("--density", help="draw weights, and skip so that this share is computed", type=float, metavar="X")
    add("--lengths", "8192,32768,131072", "tokens of a prompt", type=common.int_list("8192,131072"), metavar="N,N")
    add("--chunk", 8192, "tokens of a prompt that the engine reads in one step", type=int, metavar="N")
    add("--repeats", 3, "prompts of each length that are timed", type=int, metavar="N")
    add("--uncounted", 4, "prompts of each length that are read before those", type=int, metavar="N")
    common.add_device(add)
    add("--out", Path("build/bench_first_token.json"), type=Path, metavar="FILE")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return common.run_command(NAME, args.out, lambda: measure(args), "shorter --lengths or a smaller --model")


def measure(args: argparse.Namespace) -> None:
    """Run both engines, print the table and write --out."""
    check(args)
    stock, s2o = (alone(engine, args) for engine in (STOCK, S2O))
    file = replace(s2o, rows=[*stock.rows, *s2o.rows])
    report(file)
    write(args.out, file)


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError or ProfileError for what can be known before an engine starts, which takes a minute."""
    common.check_device(args)
    common.check_least(args, 1, "repeats", "uncounted", "chunk")
    if find_spec("vllm") is None:
        raise ConfigError("vllm is not installed: run pip install vllm, on a machine with an NVIDIA GPU")
    if (args.profile is None) == (args.density is None):
        raise ConfigError("give either --profile FILE, or --density X for random weights")
    if args.density is not None and not 0 < args.density <= 1:
        raise ConfigError(f"--density is {args.density:g}: use a number above 0, up to 1")
    if args.profile is not None:
        load_profile(args.profile)


def alone(engine: str, args: argparse.Namespace) -> FirstTokenFile:
    """`run_engine` in a new process, which ends with it. Raises ResourceError if that is lost."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(run_engine, engine, args).result()
        except BrokenProcessPool as error:
            raise ResourceError(f"the process of the {engine} engine was lost: see what vLLM printed above") from error


def run_engine(engine: str, args: argparse.Namespace) -> FirstTokenFile:
    """Time one engine's first tokens. Raises S2OError: a `ResourceError` if the engine itself fails."""
    os.environ.update(VARIABLES)
    if args.device == "cpu" and engine == S2O:
        os.environ |= {"S2O_VLLM_CPU": "support.vllm_cpu.S2OBackend", "PYTHONPATH": "tests"}
        sys.path.append("tests")
    with tempfile.TemporaryDirectory() as folder:
        try:
            return timed(engine, args, Path(folder))
        except S2OError:
            raise
        except Exception as error:  # vLLM's are of many types
            sentence = " ".join(str(error).split()) or "no message"
            raise ResourceError(f"the {engine} engine failed ({type(error).__name__}: {sentence})") from error


def timed(engine: str, args: argparse.Namespace, folder: Path) -> FirstTokenFile:
    """One engine over all lengths. folder: for what `engine_options` makes."""
    import vllm

    llm = vllm.LLM(**engine_options(engine, args, folder))
    parameters = vllm.SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    rows, all_prompts = [], prompts(args)
    for length in args.lengths:
        seconds, answers = [], []
        for _ in range(args.uncounted + args.repeats):
            prompt = next(all_prompts)
            began = time.perf_counter()
            (output,) = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
            seconds.append(time.perf_counter() - began)
            answers.append(int(output.outputs[0].token_ids[0]))
        rows.append(FirstTokens(engine, length, common.spread(seconds[args.uncounted :]), seconds[0], answers))
    summary, density = "", {}
    if engine == S2O:
        from s2o_runtime.vllm import host

        counters = host.server().counters
        summary = counters.summary()
        density = {str(layer): share for layer, share in counters.densities().items()}
        if not any(path == "s2o" for path, _ in counters.shares()):
            raise ConfigError(f"no row was computed by S2O ({summary}): use --lengths that the profile covers")
    machine = common.machine(torch.device(args.device))
    machine["versions"]["vllm"] = vllm.__version__
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "profile")}
    settings["profile"] = None if args.profile is None else str(args.profile)
    return FirstTokenFile(settings=settings, rows=rows, summary=summary, density=density, **machine)


def engine_options(engine: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The arguments of vllm.LLM; both engines have the same but for the backend. folder: for what is made here."""
    drawn = args.density is not None
    options: dict[str, Any] = {
        "model": str(sizes_folder(args.model, folder)) if drawn else resolve(args.model),
        "load_format": "dummy" if drawn else "auto",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": args.lengths[-1] + 64,
        "max_num_batched_tokens": args.chunk,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "gpu_memory_utilization": 0.8,
    }
    if args.device == "cuda":
        options["attention_backend"] = "FLASH_ATTN"
    if engine == S2O:
        from s2o_runtime.vllm.plugin import backend_name

        profile = even_profile(args, folder / "even.safetensors") if drawn else args.profile.resolve()
        options["additional_config"] = {"s2o": {"profile": str(profile), "drift": "off"}}
        if args.device == "cuda":
            options["attention_backend"] = backend_name()
    return options


def sizes_folder(model: str, folder: Path) -> Path:
    """Write a model's configuration as a folder that vLLM loads. Raises ModelError or ConfigError."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = load_config(model, random_weights=True)
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(f"model {model!r} (type {config.model_type!r}) is no plain text model: use --profile")
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    return folder


def even_profile(args: argparse.Namespace, path: Path) -> Path:
    """Write a profile for weights under which all keys count the same: behind a share x, the rest gains (1 - x) / x."""
    shape, device = geometry(load_config(args.model, random_weights=True)), identify(torch.device(args.device))
    head = HeadConfig(tau=1 / args.density - 1, segment=2048, representatives=32)
    tile = device_tile(shape.head_dim, torch.device(args.device))
    layer = LayerConfig((head,) * shape.query_heads, tile, grain=4)
    lengths = tuple(sorted({args.lengths[0], args.lengths[-1]}))
    profile = Profile(args.model, shape, "", device, lengths, ((layer,) * shape.layers,) * len(lengths))
    save_profile(profile.validate(), path)
    return path


def prompts(args: argparse.Namespace) -> Iterator[list[int]]:
    """The prompts in the order in which an engine reads them: held-out sources, or random tokens for random weights."""
    rng = random.Random(7)
    drawn = args.density is not None
    vocabulary = load_config(args.model, random_weights=True).vocab_size if drawn else 0
    tokenizer = None if drawn else load_tokenizer(args.model)
    for length in args.lengths:
        for _ in range(args.uncounted + args.repeats):
            if drawn:
                yield [rng.randrange(vocabulary) for _ in range(length)]
            else:
                yield first_tokens(tokenizer, sources(rng, held_out=True), length)


def report(file: FirstTokenFile) -> None:
    """Print the table and where S2O's rows went."""
    rows = {(row.engine, row.length): row for row in file.rows}
    cells = []
    for length in sorted({row.length for row in file.rows}):
        stock, s2o = rows[STOCK, length], rows[S2O, length]
        alike = sum(a == b for a, b in zip(stock.answers, s2o.answers, strict=True))
        medians = [f"{row.seconds.median * 1e3:.1f}" for row in (stock, s2o)]
        ratio = f"{stock.seconds.median / s2o.seconds.median:.2f}x"
        first = [f"{row.first_seconds * 1e3:.0f}" for row in (stock, s2o)]
        cells.append([str(length), *medians, ratio, *first, f"{alike} of {len(stock.answers)}"])
    title = f"first token of {file.settings['model']}, vLLM {file.versions['vllm']}"
    names = ["tokens", "stock, ms", "S2O, ms", "stock / S2O", "first stock, ms", "first S2O, ms", "same token"]
    common.print_table(title, names, cells)
    print(f"S2O: {file.summary}")


if __name__ == "__main__":
    sys.exit(main())
