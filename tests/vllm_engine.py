"""The real vLLM engine with S2O as its attention backend: on a CPU, run by `make vllm`, or on GPUs.

    python vllm_engine.py PROFILE MODEL CASE    one of CASES; exits with 1 if a needle is lost

PROFILE is a profile of the demo model for the CPU or the GPU, MODEL the folder with the demo model. Prompts of 2048
tokens, on a GPU 16384, share a text with eight hidden codes; each asks for one of them. The first is read in chunks,
the others hit its prefix in the cache, so that they bring a few tokens behind a long prefix. Times say nothing of
speed: on a CPU they are of S2O's reference in plain torch, on a GPU they include compiling.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

LAST_ROWS, LAST = 128, "the last rows of a prompt, which answer"
OF_ANSWERS = {("s2o", "rows of the model's last layer that nothing reads: they are zeros")}
OF_ANSWERS |= {("dense", "the prompt's log-probabilities are read, and the profile's budget is of answers")}
LENGTH, GPU_LENGTH, NEEDLES, SEED = 2048, 16384, 8, 1234


@dataclass(frozen=True)
class EngineCase:
    """The settings that the engine is started with."""

    chunk: int  # tokens of a step
    page: int  # tokens
    ranks: int = 1  # of tensor parallelism
    stages: int = 1  # of pipeline parallelism
    compiled: bool = False  # torch.compile, and on a GPU CUDA graphs
    sparse: bool = True  # S2O's backend
    answers: bool = False  # what the profile's budget is of, not all rows
    gpu: bool = False
    faults: bool = False  # S2O fails on the last rank, in each layer in another way
    in_folder: bool = False  # the profile is in the model's folder and no setting names it

    @property
    def length(self) -> int:
        """Tokens of a prompt."""
        return GPU_LENGTH if self.gpu else LENGTH

    @property
    def processes(self) -> int:
        """Of the model."""
        return self.ranks * self.stages


CASES = {
    "chunk-512": EngineCase(512, 16),
    "chunk-300": EngineCase(300, 32),
    "two-ranks": EngineCase(512, 16, ranks=2),
    "compiled": EngineCase(512, 16, compiled=True),
    "answers": EngineCase(512, 16, answers=True),
    "in-folder": EngineCase(512, 16, in_folder=True),
    "faults": EngineCase(512, 16, faults=True),
    "faults-rank-1": EngineCase(512, 16, ranks=2, faults=True),
    "dense": EngineCase(512, 32, sparse=False),  # vLLM's own backend: its pages have at least 32 tokens
    "gpu-eager": EngineCase(4096, 16, gpu=True),
    "gpu-graphs": EngineCase(4096, 16, compiled=True, gpu=True),
    "gpu-two-ranks": EngineCase(4096, 16, ranks=2, gpu=True),
    "gpu-two-stages": EngineCase(4096, 16, stages=2, gpu=True),
}


def main(profile: str, model: str, name: str) -> int:
    case = CASES[name]
    set_environment(case)
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    prompts, codes = questions(AutoTokenizer.from_pretrained(model), case.length)
    if case.sparse:
        settings = {"drift": "off" if case.answers else "auto"}  # a proof's limits are of its budget
        settings["profile"] = adapt(profile, model, f"{name}.safetensors", "kl" if case.answers else "mse")
        if case.in_folder:
            model = shutil.copytree(model, name, dirs_exist_ok=True)
            os.makedirs(f"{model}/s2o", exist_ok=True)
            shutil.move(settings.pop("profile"), f"{model}/s2o")
    engine = LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=case.length + 128,
        max_num_batched_tokens=case.chunk,
        max_num_seqs=8,
        block_size=case.page,
        tensor_parallel_size=case.ranks,
        pipeline_parallel_size=case.stages,
        enforce_eager=not case.compiled,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        attention_backend=backend(case),
        additional_config={"s2o": settings} if case.sparse else {},
        gpu_memory_utilization=0.4,
    )
    if case.sparse and case.processes == 1:
        from s2o_runtime.vllm.engine import get_server

        get_server().fit.host_flops = 0.0  # these prompts are little work for a GPU
    began = time.time()
    answers = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=5))
    seconds = time.time() - began
    asked = engine.generate(prompts[:1], SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs[1:]
    total = sum(token.logprob for tokens in asked for token in tokens.values())
    print(f"{name}: the first prompt's log-probabilities are {total:.1f}", flush=True)
    if case.sparse and case.processes == 1:
        counters = get_server().counters
        print(f"{name}: {counters.summary()}", flush=True)
        errors = {error for _, error in counters.faults}
        assert len(errors) == 4 * case.faults, f"S2O failed otherwise than it should: {counters.faults}"
        if not case.faults:
            check_rows(counters.shares())
        assert not case.answers or counters.shares().keys() >= OF_ANSWERS
        dense = SamplingParams(temperature=0, max_tokens=5, extra_args={"s2o": "off"})
        first, second = (engine.generate(prompts[:1], dense)[0].num_cached_tokens for _ in range(2))
        print(
            f"{name}: a request that opts out finds {first} tokens in the cache, then {second} of its own", flush=True
        )
        assert first == 0 < second
    texts = [answer.outputs[0].text for answer in answers]
    return report(name, codes, texts, [answer.num_cached_tokens for answer in answers], seconds)


def report(name: str, codes: list[str], texts: list[str], cached: list[int], seconds: float) -> int:
    """Print how many answers have their codes; returns 1 if one has not."""
    right = sum(code in text for code, text in zip(codes, texts, strict=True))
    print(f"{name}: {right} of {len(codes)} needles in {seconds:.1f} s; tokens from the cache: {cached}", flush=True)
    return int(right < len(codes))


def check_rows(rows: Collection[tuple[str, str]]) -> None:
    """Check that every kind of rows, by path and reason, is there."""
    assert any(path == "s2o" for path, _ in rows), "no row was computed by S2O"
    assert ("dense", LAST) in rows, "no row was dense for being the last of a prompt"


def adapt(profile: str, model: str, out: str, budget: str = "mse") -> str:
    """Write a profile with dense last rows, a kind of budget and the config's values, whether it has them or not.

    Returns the new path.
    """
    from transformers import AutoConfig

    from s2o_runtime.identity import CONFIG, dump_json, select_config_values
    from s2o_runtime.profile import load_profile, save_profile

    made = load_profile(Path(profile))
    layers = tuple(
        tuple(layer if layer.is_dense else replace(layer, last_rows=LAST_ROWS) for layer in bucket)
        for bucket in made.layers
    )
    record = {**made.record, "budget": {"kind": budget, "value": 1e-4}}
    config = CONFIG + dump_json(select_config_values(AutoConfig.from_pretrained(model)))
    made = replace(made, layers=layers, record=record, fingerprint=made.fingerprint.partition(CONFIG)[0] + config)
    save_profile(made, Path(out))
    return str(Path(out).resolve())


def set_environment(case: EngineCase) -> None:
    """Return what vLLM reads of it as it is imported."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if case.processes == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the counters are in this process
    if case.gpu:
        # would be compiled at the first prompt, by a compiler that may be missing
        os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}
        return
    if case.processes > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(case.processes)))  # a core for each
    if case.sparse:
        os.environ |= {"S2O_VLLM_CPU": "support.vllm_cpu.S2OBackend", "PYTHONPATH": str(Path(__file__).parent)}
    if case.faults:
        os.environ["S2O_FAULTS"] = str(case.ranks - 1)


def backend(case: EngineCase) -> str | None:
    """The name that vLLM is given; None for its own choice."""
    if not case.sparse:
        return None
    if not case.gpu:
        return "S2O"  # understood, and passed on to the ranks; a CPU has one backend only
    from s2o_runtime.vllm.plugin import get_backend_name

    return get_backend_name()


def questions(
    tokenizer: object, length: int = LENGTH, count: int = NEEDLES
) -> tuple[list[dict[str, list[int]]], list[str]]:
    """A prompt of about `length` tokens for each needle, all with one text, and the codes that answer them."""
    from calibrate.prompts.documents import make_prompts_of_one_text

    prompts, codes = make_prompts_of_one_text(tokenizer, length, count, random.Random(SEED))
    return [{"prompt_token_ids": prompt} for prompt in prompts], codes


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
