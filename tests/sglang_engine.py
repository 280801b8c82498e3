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
from dataclasses import dataclass
from urllib.request import urlopen

from vllm_engine import questions

LENGTH, METRICS_PORT = 2048, 9217
SAMPLE = re.compile(r's2o_rows_total\{.*path="(\w+)",rank="(\d+)",reason="([^"]*)".*\} (\S+)')


@dataclass(frozen=True)
class EngineCase:
    """How the engine is started.

    chunk: tokens of a step. page: tokens of a page. ranks: of tensor parallelism. mixed: steps have decodes and prompts.
    sparse: S2O's backend.
    """

    chunk: int
    page: int = 1
    ranks: int = 1
    mixed: bool = False
    sparse: bool = True


CASES = {
    "chunk-512": EngineCase(512),
    "chunk-300": EngineCase(300, page=16),
    "mixed": EngineCase(512, mixed=True),
    "two-ranks": EngineCase(512, ranks=2),
    "dense": EngineCase(512, sparse=False),
}


def main(profile: str, model: str, name: str) -> int:
    case = CASES[name]
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if case.sparse:
        os.environ["S2O_SETTINGS"] = json.dumps({"profile": profile, "metrics_port": METRICS_PORT})
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
        disable_overlap_schedule=True,
        grammar_backend="none",
    )
    try:
        began = time.time()
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        parameters = {"temperature": 0, "max_new_tokens": 5}
        # the first is read alone, so that the others find it in the cache
        answers = engine.generate(input_ids=ids[:1], sampling_params=parameters)
        answers += engine.generate(input_ids=ids[1:], sampling_params=parameters)
        seconds = time.time() - began
        found = sum(code in answer["text"] for code, answer in zip(codes, answers, strict=True))
        cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
        print(f"{name}: {found} of {len(codes)} needles in {seconds:.1f} s; tokens from the cache: {cached}", flush=True)
        if case.sparse:
            for rank in range(case.ranks):
                rows = counted(METRICS_PORT + rank)
                shares = "; ".join(f"{count} {path} ({reason})" for (path, reason), count in rows.items())
                print(f"{name}: rows of all layers on rank {rank}: {shares}", flush=True)
                assert any(path == "s2o" for path, _ in rows), "no row was computed by S2O"
                assert any(path == "dense" for path, _ in rows), "no row was computed by the stock backend"
    finally:
        engine.shutdown()
    return int(found < len(codes))


def counted(port: int) -> dict[tuple[str, str], int]:
    """The rows that a rank counted, by path and reason."""
    with urlopen(f"http://localhost:{port}/metrics") as answer:
        samples = SAMPLE.findall(answer.read().decode())
    rows: dict[tuple[str, str], int] = {}
    for path, _, reason, count in samples:
        rows[path, reason] = rows.get((path, reason), 0) + int(float(count))
    return rows


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
