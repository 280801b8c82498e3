#!/usr/bin/env python3
"""The time to the first token of vLLM's whole engine, its stock backend against S2O.

    python -m scripts.bench.first_token --model demo --profile profiles/demo/nvidia-h200/rel-mse-0.001.safetensors
    python -m scripts.bench.first_token --model llama-3.1-8b --density 0.25 --chunks 2048,8192

Each engine runs in a process of its own, with half of the GPU's memory. Both read the same prompts in turns, one at a
time, so that what else the machine does meets both; with CUDA graphs, torch.compile and the prefix cache, as a server
does by default. The cache is emptied before a prompt that is not to hit it. S2O runs without its drift check. The first
prompts of a kind are not counted: they may include compiling, and S2O records launches in the second to the fourth of
like calls, to replay them from then on. All chunks are timed in one engine, which is started for the largest.

Beside whole prompts of --lengths there are an agent's turns: --new tokens behind --cached ones, as far as they fit the
longest of --lengths. Ratios are medians over turns, each turn with one prompt, and in parentheses an interval that
holds it with 95% confidence (94% of five turns): where that is all below 1, S2O is slower.

S2O's engine reads each prompt once more, as a request that opts out of S2O, which the stock backend computes in the
same process: "off / S2O" and its verdict are free of what differs between two processes. "stock / off" is just that.

With --profile each engine is asked for eight codes that are hidden in a text of the longest length.
With --density vLLM draws weights for the model's sizes, prompts are random tokens, and the profile is written here.
Random weights attend nearly evenly, so one tau for all heads has them compute about that share of the keys before a
segment; a segment's own keys are always computed. Their answers say nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise, product
from multiprocessing import get_context
from operator import truediv
from pathlib import Path
from typing import Any, ClassVar

import torch
from scipy.stats import binom

from calibrate.model.models import load_config, load_tokenizer, resolve
from calibrate.prompts.documents import make_prompts_of_one_text, shuffle_held_out_sources, take_first_tokens
from calibrate.recipe import DEFAULT_LAST_ROWS
from calibrate.tables import Table, open_console, print_table
from s2o_runtime.config import HeadConfig, LayerConfig
from s2o_runtime.devices import identify
from s2o_runtime.errors import ConfigError, ResourceError, S2OError
from s2o_runtime.identity import geometry
from s2o_runtime.profile import Profile, load_profile, save_profile
from scripts.bench import common
from scripts.bench.calls import device_tile
from scripts.bench.schema import ResultFile, Spread, write

NAME = "scripts.bench.first_token"
STOCK, S2O, OFF = "stock", "S2O", "S2O off"  # the last: requests to S2O's engine that opt out of it
MEMORY = 0.88  # of the GPU, for all engines
LONG = 65536  # new tokens of a prompt: those of half as many are timed twice as often, up to eight times
NEEDLES, NEEDLE_TOKENS = 8, 16  # codes that are asked for, and tokens of an answer
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the counters are in the engine's process
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # a prompt of the longest length, and its answer
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # would be compiled at the first prompt, by a compiler that may be missing
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class PromptKind:
    """A kind of prompt. chunk: tokens of a step. hit: the share of its tokens that is in the prefix cache."""

    length: int
    chunk: int
    hit: float


@dataclass(frozen=True)
class FirstTokens:
    """One engine with one kind of prompt.

    first_seconds: of the first prompt. cached: tokens from the prefix cache, the fewest of a timed prompt.
    answers: the first token after each prompt. turns: seconds of each timed prompt; older files lack them.
    """

    engine: str
    kind: PromptKind
    seconds: Spread
    first_seconds: float
    cached: int
    answers: list[int]
    turns: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class OpenLoop:
    """One engine under requests that arrive at random times. Times are in seconds.

    requests: how many. rate: of them a second. first_median, first_p99: from a request's arrival to its first token.
    between_median, between_p99: from a token of a request to its next, while others are read.
    """

    engine: str
    requests: int
    rate: float
    first_median: float
    first_p99: float
    between_median: float
    between_p99: float


@dataclass(frozen=True, kw_only=True)
class FirstTokenFile(ResultFile):
    """The results of both engines, or of one of them.

    needles: how many of the hidden codes each engine named; none without --profile.
    summary: where S2O's query rows went, and why. density: of each layer's last sampled call, by the layer's number;
    few prompts have but one, the first.
    """

    program: ClassVar[str] = f"python -m {NAME}"

    format: str = "s2o-bench-first-token/2"
    rows: list[FirstTokens]
    needles: dict[str, int] = field(default_factory=dict)
    summary: str
    density: dict[str, float]


def parser(name: str = NAME, doc: str | None = __doc__) -> common.Parser:
    """Return the parser of this bench, or of another one of the same engines."""
    out, add = common.bench_parser(name, doc)
    add("--model", "demo", "alias, folder or hub id; with --density an alias or folder whose sizes are taken")
    add("--profile", help="the model's profile", type=Path, metavar="FILE")
    add("--density", help="draw weights, and skip so that this share is computed", type=float, metavar="X")
    add("--lengths", "8192,32768,131072", "tokens of a prompt", type=common.int_list("8192,131072"), metavar="N,N")
    add("--chunks", "8192", "tokens that the engine reads in a step", type=common.int_list("2048,8192"), metavar="N,N")
    add("--cached", "32768,98304", "cached tokens", type=common.int_list("32768"), metavar="N,N")
    add("--new", "512,2048,8192", "tokens behind them", type=common.int_list("512,2048"), metavar="N,N")
    add("--repeats", 5, "long prompts of each kind that are timed", type=int, metavar="N")
    add("--uncounted", 4, "prompts of each kind that are read before those", type=int, metavar="N")
    common.add_machine(add, f"bench_{name.rpartition('.')[2]}.json")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    return common.run_command(parser(), argv, measure, "shorter --lengths or a smaller --model")


def measure(args: argparse.Namespace) -> None:
    """Run both engines, print the table and write --out, after each kind of prompt too."""
    with start_engines(args) as engines:
        text, rows = Text(args), []
        for kind in list_kinds(args):
            rows += first_tokens_of(engines, kind, text, args)
            write(args.out, file_of(args, engines[S2O], rows))
        needles = {} if args.profile is None else {name: one.call("needles") for name, one in engines.items()}
        print(f"needles: {needles}", flush=True)
        file = file_of(args, engines[S2O], rows, needles=needles)
        if not file.summary:
            raise ConfigError("no row was computed by S2O: use --lengths that the profile covers")
        write(args.out, file)
    report(file)


@contextmanager
def start_engines(args: argparse.Namespace) -> Iterator[dict[str, Remote]]:
    """Yield the engines, by name."""
    check(args)
    os.environ.update(VARIABLES)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engines = {name: Remote(name, args, Path(folder) / name) for name in (STOCK, S2O)}
        for engine in engines.values():  # one behind the other: each looks at how much memory is free
            stack.enter_context(engine)
        yield engines


def list_kinds(args: argparse.Namespace) -> list[PromptKind]:
    """List the kinds of prompts: whole ones, then turns."""
    sizes = [(cached + new, chunk, cached) for cached, new, chunk in product(args.cached, args.new, args.chunks)]
    turns = [PromptKind(length, chunk, hit / length) for length, chunk, hit in sizes if length <= args.lengths[-1]]
    return [PromptKind(*size, 0.0) for size in product(args.lengths, args.chunks)] + turns


def file_of(args: argparse.Namespace, s2o: Remote, rows: list[FirstTokens], **more: Any) -> FirstTokenFile:
    """Return what is known so far."""
    return FirstTokenFile(settings=settings_of(args), rows=rows, **s2o.call("seen"), **more)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options as a file has them."""
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "profile")}
    return settings | {"profile": None if args.profile is None else str(args.profile)}


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError or ProfileError for what can be known before an engine starts, which takes a minute."""
    common.check_device(args)
    common.check_least(args, 5, "repeats")
    common.check_least(args, 1, "uncounted")
    if min(args.lengths[0], args.chunks[0]) < 1:
        raise ConfigError("--lengths and --chunks need numbers of at least 1")
    if find_spec("vllm") is None:
        raise ConfigError("vllm is not installed: run pip install vllm, on a machine with an NVIDIA GPU")
    if (args.profile is None) == (args.density is None):
        raise ConfigError("give either --profile FILE, or --density X for random weights")
    if args.density is not None and not 0 < args.density <= 1:
        raise ConfigError(f"--density is {args.density:g}: use a number above 0, up to 1")
    if args.profile is not None:
        load_profile(args.profile)


class Remote:
    """An engine in a process of its own."""

    def __init__(self, name: str, args: argparse.Namespace, folder: Path) -> None:
        self._name, self._given = name, (name, args, folder)
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        self._pool.submit(import_module, "vllm")  # takes half a minute, in which another engine starts

    def __enter__(self) -> Remote:
        self._run(start_served, *self._given)
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what a method of the process's `Served` returns. Raises S2OError: `ResourceError` if it fails."""
        return self._run(call_served, method, *arguments)

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._pool.submit(function, *arguments).result()
        except BrokenProcessPool as error:
            problem = f"the process of the {self._name} engine was lost: see what vLLM printed above"
            raise ResourceError(problem) from error


served: list[Served] = []  # of this process, one


def start_served(*given: Any) -> None:
    """Start the engine of this process."""
    served.append(Served(*given))


def call_served(method: str, *arguments: Any) -> Any:
    """Call a method of the engine of this process."""
    return getattr(served[0], method)(*arguments)


class Served:
    """vLLM with one of the backends. folder: for what `engine_options` makes.

    Raises:
        S2OError: a `ResourceError` if the engine itself fails, in each method too.
    """

    def __init__(self, engine: str, args: argparse.Namespace, folder: Path) -> None:
        if args.device == "cpu" and engine == S2O:
            os.environ |= {"S2O_VLLM_CPU": "support.vllm_cpu.S2OBackend", "PYTHONPATH": "tests"}
            sys.path.append("tests")
        folder.mkdir()
        self.engine, self.args = engine, args
        with failures(engine):
            import vllm

            self.llm = vllm.LLM(**engine_options(engine, args, folder))

    def prepare(self, chunk: int, cached: list[list[int]], off: bool = False) -> None:
        """Read prompts in such chunks from now on, with these prefixes and no others in the cache.

        off: with what requests that opt out of S2O find there, too.
        """
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler  # the engine is in this process
        scheduler.max_num_scheduled_tokens = chunk  # at most those that it is started for
        self.llm.reset_prefix_cache()
        for prefix, opts_out in product(cached, (False, True) if off else (False,)):
            self.read(prefix, False, opts_out)

    def read(self, prompt: list[int], reset: bool, off: bool) -> tuple[float, int, int]:
        """Seconds to the first token of a prompt, tokens of it that were cached, and the token.

        reset: the cache, before. off: the request opts out of S2O.
        """
        with failures(self.engine):
            if reset:
                self.llm.reset_prefix_cache()
            began = time.perf_counter()
            (output,) = answer(self.llm, [prompt], off=off)
            seconds = time.perf_counter() - began
            return seconds, int(output.num_cached_tokens or 0), int(output.outputs[0].token_ids[0])

    def needles(self) -> int:
        """Count the codes that the engine names, of `NEEDLES` in one text of the longest length."""
        tokenizer = load_tokenizer(self.args.model)
        prompts, codes = make_prompts_of_one_text(
            tokenizer, self.args.lengths[-1] - NEEDLE_TOKENS, NEEDLES, random.Random(7)
        )
        with failures(self.engine):
            self.prepare(self.args.chunks[-1], [])
            outputs = answer(self.llm, prompts, NEEDLE_TOKENS)  # all prompts but the first hit the cache
        texts = [tokenizer.decode(output.outputs[0].token_ids) for output in outputs]
        return sum(code in text for code, text in zip(codes, texts, strict=True))

    def open_loop(
        self, rate: float, prompts: list[list[int]], arrivals: list[float], cached: list[list[int]], tokens: int
    ) -> OpenLoop:
        """Answer requests that arrive at these times with so many tokens each, behind what is cached."""
        with failures(self.engine):
            self.prepare(self.args.chunks[-1], cached)
            times = self._arrive(prompts, arrivals, tokens)
        first = [of_request[0] - arrival for of_request, arrival in zip(times, arrivals, strict=True)]
        between = [after - before for of_request in times for before, after in pairwise(of_request)]
        waits = [*common.quantiles(first, 0.5, 0.99), *common.quantiles(between, 0.5, 0.99)]
        loop = OpenLoop(self.engine, len(prompts), rate, *waits)
        print(f"{self.engine}: {loop}", flush=True)
        return loop

    def _arrive(self, prompts: list[list[int]], arrivals: list[float], tokens: int) -> list[list[float]]:
        """Return the time of each token of each request, in seconds since the first could arrive."""
        import vllm

        parameters = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        times: list[list[float]] = [[] for _ in prompts]
        engine, added, began = self.llm.llm_engine, 0, time.perf_counter()
        while added < len(prompts) or engine.has_unfinished_requests():
            now = time.perf_counter() - began
            while added < len(prompts) and arrivals[added] <= now:
                engine.add_request(str(added), {"prompt_token_ids": prompts[added]}, parameters)
                added += 1
            if not engine.has_unfinished_requests():
                time.sleep(max(arrivals[added] - now, 1e-3))
                continue
            outputs, now = engine.step(), time.perf_counter() - began
            for output in outputs:
                of_request = times[int(output.request_id)]
                of_request += [now] * (len(output.outputs[0].token_ids) - len(of_request))
        return times

    def seen(self) -> dict[str, Any]:
        """Fields of `FirstTokenFile` that S2O's process knows; the summary is empty where it computed no row."""
        import vllm

        from s2o_runtime.vllm import engine as vllm_engine

        counters = vllm_engine.get_server().counters
        machine = common.machine(torch.device(self.args.device))
        machine["versions"]["vllm"] = vllm.__version__
        used = any(path == "s2o" for path, _ in counters.shares())
        density = {str(layer): share for layer, share in counters.densities().items()}
        return {"summary": counters.summary() if used else "", "density": density, **machine}


@contextmanager
def failures(engine: str) -> Iterator[None]:
    """Inside the block, what vLLM raises is a `ResourceError`; its own errors are of many types."""
    try:
        yield
    except S2OError:
        raise
    except Exception as error:
        sentence = " ".join(str(error).split()) or "no message"
        raise ResourceError(f"the {engine} engine failed ({type(error).__name__}: {sentence})") from error


def first_tokens_of(
    engines: dict[str, Remote], kind: PromptKind, text: Text, args: argparse.Namespace
) -> list[FirstTokens]:
    """Time one kind of prompt in both engines, in S2O's also without S2O, in turns."""
    shared = text.tokens(round(kind.hit * kind.length))
    for name, engine in engines.items():
        engine.call("prepare", kind.chunk, [shared] if shared else [], name == S2O)
    reads: dict[str, list[tuple[float, int, int]]] = {name: [] for name in (STOCK, S2O, OFF)}
    repeats = args.repeats * max(1, min(8, LONG // (kind.length - len(shared))))  # a short one's host time varies
    for turn in range(args.uncounted + repeats):
        prompt = [*shared, *text.tokens(kind.length - len(shared))]
        for name in sorted(reads, reverse=bool(turn % 2)):
            engine = engines[S2O if name == OFF else name]
            reads[name].append(engine.call("read", prompt, not shared, name == OFF))
    rows = []
    for name, of_engine in reads.items():
        seconds, cached, answers = (list(values) for values in zip(*of_engine, strict=True))
        fewest, turns = min(cached[args.uncounted :]), seconds[args.uncounted :]
        rows.append(FirstTokens(name, kind, common.spread(turns), seconds[0], fewest, answers, turns))
    times = [(row.engine, row.seconds.median * 1e3, row.first_seconds * 1e3) for row in rows]
    print(f"{kind}: {'; '.join(f'{name} {ms:.1f} ms, the first {first:.0f}' for name, ms, first in times)}", flush=True)
    return rows


def answer(llm: Any, prompts: Sequence[list[int]], tokens: int = 1, off: bool = False) -> Any:
    """vLLM's outputs for some prompts, so many tokens each. off: the requests opt out of S2O."""
    import vllm

    extra = {"s2o": "off"} if off else None
    parameters = vllm.SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, extra_args=extra)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)


def engine_options(engine: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The arguments of vllm.LLM; both engines have the same but for the backend. folder: for what is made here."""
    drawn = args.density is not None
    options: dict[str, Any] = {
        "model": str(sizes_folder(args.model, folder)) if drawn else resolve(args.model),
        "load_format": "dummy" if drawn else "auto",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": args.lengths[-1] + 64,
        "max_num_batched_tokens": args.chunks[-1],
        "max_num_seqs": 8,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "gpu_memory_utilization": MEMORY / 2,
    }
    if args.device == "cuda":
        options["attention_backend"] = "FLASH_ATTN"
    if engine == S2O:
        from s2o_runtime.vllm.plugin import get_backend_name

        profile = even_profile(args, folder / "even.safetensors") if drawn else args.profile.resolve()
        options["additional_config"] = {"s2o": {"profile": str(profile), "strict": False, "drift": "off"}}
        if args.device == "cuda":
            options["attention_backend"] = get_backend_name()
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
    head = HeadConfig(tau=1 / args.density - 1, segment=2048, representatives=16)
    tile = device_tile(shape.head_dim, torch.device(args.device))
    layer = LayerConfig((head,) * shape.query_heads, tile, last_rows=DEFAULT_LAST_ROWS)
    lengths = tuple(sorted({max(8192, args.lengths[0]), args.lengths[-1]}))  # as calibrated ones begin
    profile = Profile(args.model, shape, "", device, lengths, ((layer,) * shape.layers,) * len(lengths))
    save_profile(profile.validate(), path)
    return path


class Text:
    """The source of prompts, the same for both engines: held-out text, or random tokens for random weights."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rng = random.Random(7)
        if args.density is not None:
            vocabulary = load_config(args.model, random_weights=True).vocab_size
            self.ids = [self.rng.randrange(vocabulary) for _ in range(2 * args.lengths[-1])]
        else:
            files = shuffle_held_out_sources(self.rng)
            self.ids = take_first_tokens(load_tokenizer(args.model), files, 2 * args.lengths[-1])

    def tokens(self, length: int) -> list[int]:
        """So many tokens from a random place on."""
        start = self.rng.randrange(len(self.ids) - length)
        return self.ids[start : start + length]


def compare_turns(stock: list[float], other: list[float]) -> tuple[float, float, float]:
    """Return how many times faster the other engine's turns were: the median, and an interval from order statistics."""
    ratios = sorted(map(truediv, stock, other))
    first = max(0, int(binom.ppf(0.025, len(ratios), 0.5)) - 1)
    return statistics.median(ratios), ratios[first], ratios[-1 - first]


def report(file: FirstTokenFile) -> None:
    """Print the tables, the needles and where S2O's rows went."""
    rows = {(row.engine, row.kind): row for row in file.rows}
    cells = []
    for kind in dict.fromkeys(row.kind for row in file.rows):
        stock, s2o, off = (rows[name, kind] for name in (STOCK, S2O, OFF))
        alike = sum(a == b for a, b in zip(stock.answers, s2o.answers, strict=True))
        medians = [f"{row.seconds.median * 1e3:.1f}" for row in (stock, off, s2o)]
        ratio, low, high = compare_turns(off.turns, s2o.turns)
        verdict = "faster" if low > 1 else "slower" if high < 1 else "alike"
        first = [f"{row.first_seconds * 1e3:.0f}" for row in (stock, s2o)]
        numbers = [str(kind.length), str(kind.chunk), str(s2o.cached)]
        noise = f"{compare_turns(stock.turns, off.turns)[0]:.2f}x"
        interval = f"{ratio:.2f}x ({low:.2f} to {high:.2f})"
        cells.append([*numbers, *medians, interval, verdict, noise, *first, f"{alike} of {len(stock.answers)}"])
    title = f"first token of {file.settings['model']}, vLLM {file.versions['vllm']}"
    times, firsts = ("stock, ms", "off, ms", "S2O, ms"), ("first stock, ms", "first S2O, ms")
    names = ("tokens", "chunk", "cached", *times, "off / S2O", "S2O is", "stock / off", *firsts, "same token")
    print_table(Table(names, cells, title), open_console())
    for engine, right in file.needles.items():
        print(f"{engine}: {right} of {NEEDLES} needles")
    print(f"S2O: {file.summary}")


if __name__ == "__main__":
    sys.exit(main())
