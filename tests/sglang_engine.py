"""The real SGLang engine with S2O as its attention backend, on a CPU: run by `make sglang`.

    python sglang_engine.py PROFILE MODEL CASE    one of CASES; exits with 1 if a needle is lost

PROFILE is a profile of the demo model for the CPU, MODEL the folder with the demo model. Prompts of 2048 tokens share a
text with eight hidden codes; each asks for one of them. The first is read in chunks, the others hit its prefix in the
radix cache, so that they bring a few tokens behind a long prefix. S2O is mixed into SGLang's backend in plain torch,
because its kernels need a GPU; times say nothing of speed.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from urllib.request import urlopen

from vllm_engine import OF_ANSWERS, adapt, check_rows, questions, report

LENGTH, METRICS_PORT = 2048, 9217
SAMPLE = re.compile(r's2o_rows_total\{.*path="(\w+)",.*rank="(\d+)",reason="([^"]*)".*\} (\S+)')


# 1, in every process of the engine: S2O is mixed into SGLang's FlashAttention backend
FLASH_VARIABLE = "S2O_TEST_FLASH"


def stand_in(name: str, **contents: object) -> None:
    """Put a module in the place of one that a CPU does not have."""
    module = sys.modules.setdefault(name, ModuleType(name))
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(contents)


# without a GPU, SGLang's rotary embedding imports vLLM's and never calls it; every process of the engine runs this file
stand_in("vllm")
stand_in("vllm._custom_ops", rotary_embedding=None)


def in_torch(q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, softmax_scale, **more):  # type: ignore[no-untyped-def]
    """FlashAttention's kernel for paged keys, as SGLang calls it for prompts: dense, in plain torch."""
    from s2o_runtime.attention.paged import s2o_attention_paged
    from s2o_runtime.config import LayerConfig

    assert more["causal"]
    assert more["window_size"] == (-1, -1)
    return s2o_attention_paged(
        q,
        k_cache,
        v_cache,
        LayerConfig.uniform(q.shape[1], mode="dense"),
        cu_q=cu_seqlens_q,
        seq_lens=cache_seqlens,
        block_table=page_table.int(),
        max_q=max_seqlen_q,
        max_k=int(cache_seqlens.max()),
        scale=softmax_scale,
        backend="dense",
        out=q.new_empty(q.shape),
    )


def flash_in_torch(runner: object) -> type:
    """SGLang's FlashAttention backend, whose kernel is in plain torch."""
    from sglang.srt.layers.attention import flashattention_backend

    flashattention_backend.flash_attn_with_kvcache = in_torch
    return flashattention_backend.FlashAttentionBackend  # type: ignore[no-any-return]


if os.environ.get(FLASH_VARIABLE) == "1":
    from s2o_runtime.sglang import engine as s2o_engine

    stand_in("sgl_kernel", merge_state_v2=None)
    flash = ("flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata")
    stand_in("sgl_kernel.flash_attn", **dict.fromkeys(flash))
    s2o_engine.get_stock_class = flash_in_torch


@dataclass(frozen=True)
class EngineCase:
    """The settings that the engine is started with."""

    chunk: int  # tokens of a step
    page: int = 1  # tokens
    ranks: int = 1  # of tensor parallelism
    mixed: bool = False  # a short prompt decodes in the steps of a long one
    sparse: bool = True  # S2O's backend
    flash: bool = False  # on top of SGLang's FlashAttention backend, its kernel in torch
    answers: bool = False  # what the profile's budget is of, not all rows


CASES = {
    "chunk-512": EngineCase(512),
    "chunk-304": EngineCase(304, page=16),
    "mixed": EngineCase(512, mixed=True),
    "two-ranks": EngineCase(512, ranks=2),
    "flash": EngineCase(512, mixed=True, flash=True),
    "flash-pages": EngineCase(304, page=16, mixed=True, flash=True),
    "answers": EngineCase(512, answers=True),
    "dense": EngineCase(512, sparse=False),
}


def main(profile: str, model: str, name: str) -> int:
    case = CASES[name]
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(case.ranks)))  # a core for each
    os.environ[FLASH_VARIABLE] = str(int(case.flash))
    if case.sparse:
        settings = {"metrics_port": METRICS_PORT, "drift": "off" if case.answers else "auto"}
        settings["profile"] = adapt(profile, model, f"{name}.safetensors", "kl" if case.answers else "mse")
        os.environ["S2O_SETTINGS"] = json.dumps(settings)
    import sglang
    from transformers import AutoTokenizer

    prompts, codes = questions(AutoTokenizer.from_pretrained(model), LENGTH)
    engine = sglang.Engine(
        model_path=model,
        device="cpu",
        dtype="bfloat16",
        context_length=LENGTH + 128,
        chunked_prefill_size=case.chunk,
        page_size=case.page,
        tp_size=case.ranks,
        enable_mixed_chunk=case.mixed,
        max_total_tokens=LENGTH * 8,
        max_running_requests=8,
        attention_backend="torch_native" if not case.sparse else None,
        prefill_attention_backend="s2o" if case.sparse else None,
        decode_attention_backend="torch_native" if case.sparse else None,
        disable_cuda_graph=True,
        disable_prefill_cuda_graph=True,
        grammar_backend="none",
        log_level="info",
    )
    try:
        began = time.time()
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        parameters = {"temperature": 0, "max_new_tokens": 5}
        # the first is read before the others, which find it in the cache
        if case.mixed:  # a short prompt decodes in its steps
            talk = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
            answers = engine.generate(input_ids=[ids[0][-100:], ids[0]], sampling_params=[talk, parameters])[1:]
        else:
            answers = engine.generate(input_ids=ids[:1], sampling_params=parameters)
        answers += engine.generate(input_ids=ids[1:], sampling_params=parameters)
        seconds = time.time() - began
        asked = engine.generate(input_ids=ids[0], sampling_params=parameters, return_logprob=True, logprob_start_len=0)
        total = sum(logprob for logprob, *_ in asked["meta_info"]["input_token_logprobs"][1:])
        print(f"{name}: the first prompt's log-probabilities are {total:.1f}", flush=True)
        for rank in range(case.ranks if case.sparse else 0):
            rows = counted(METRICS_PORT + rank)
            shares = "; ".join(f"{count} {path} ({reason})" for (path, reason), count in rows.items())
            print(f"{name}: rows of all layers on rank {rank}: {shares}", flush=True)
            check_rows(rows)
            assert not case.answers or rows.keys() >= OF_ANSWERS
            assert not case.mixed or ("dense", "decode") in rows, "no row was decoded beside prompts"
    finally:
        engine.shutdown()
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    return report(name, codes, [answer["text"] for answer in answers], cached, seconds)


def counted(port: int) -> Counter[tuple[str, str]]:
    """The rows that a rank counted, by path and reason."""
    with urlopen(f"http://localhost:{port}/metrics") as answer:
        samples = SAMPLE.findall(answer.read().decode())
    rows: Counter[tuple[str, str]] = Counter()
    for path, _, reason, count in samples:
        rows[path, reason] += int(float(count))
    return rows


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
