"""Serve a patched model by transformers' `generate_batch`: of several prompts at once, long ones run S2O.

    python examples/continuous_batching.py [PROFILE] [TOKENS]

Needs transformers 5.17 or 5.18; docs/deploy.md says what to do with newer ones. On a CPU transformers asks psutil
for the memory (pip install psutil).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

from calibrate.model.models import load
from calibrate.prompts.documents import make_held_out_prompts
from s2o_runtime import explain, load_profile, patch

SHIPPED = Path(__file__).resolve().parent.parent / "profiles" / "demo" / "cpu" / "mse-0.0001.safetensors"


def main(path: Path, tokens: int) -> None:
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 19):
        sys.exit(f"transformers {transformers.__version__} takes patched models in another way: docs/deploy.md has it")
    profile = load_profile(path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load(profile.model_name, device, resident=True)
    prompts = make_held_out_prompts(loaded.tokenizer, tokens, 2, seed=1234)
    asked = [prompt.ids[: prompt.answers[0][0]].tolist() for prompt in prompts]
    asked.append(asked[0][-100:])  # a short one, which stays dense

    patch(loaded.model, profile).set_attn_implementation("paged|s2o")
    results = loaded.model.generate_batch(
        asked,
        generation_config=GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(block_size=16, num_blocks=512, max_batch_tokens=4096),
        progress_bar=False,
    )
    for result in results.values():
        answer = loaded.tokenizer.decode(result.generated_tokens)
        print(f"{len(result.prompt_ids)} tokens: answers {answer!r}")
    for prompt in prompts:
        first, end = prompt.answers[0]
        print(f"expected {loaded.tokenizer.decode(prompt.ids[first:end])!r}")
    print(explain(loaded.model))


if __name__ == "__main__":
    main(
        Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED,
        int(sys.argv[2]) if len(sys.argv) > 2 else 1100,
    )
