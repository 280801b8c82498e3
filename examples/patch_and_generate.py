"""Patch a transformers model with a profile, and print its answers, the path of each layer and the prefill's time.

    python examples/patch_and_generate.py PROFILE [TOKENS]

The prompt is source code with hidden codes and asks for them at its end; the dense and the patched model complete
every answer by greedy generation. Prefills are timed in a second run.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor

from calibrate.model.models import LoadedModel, load
from calibrate.prompts.documents import make_held_out_prompts
from s2o_runtime import explain, load_profile, patched


def main(path: str, tokens: int | None = None) -> None:
    profile = load_profile(path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load(profile.model_name, device, resident=True)
    prompt = make_held_out_prompts(loaded.tokenizer, tokens or profile.lengths[-1], 1, seed=1234)[0]
    print(f"{profile.model_name}, {prompt.length} tokens, on {device}")

    dense, dense_seconds = generate_answers(loaded, prompt.ids, prompt.answers), time_prefill(loaded, prompt.ids)
    with patched(loaded.model, profile):
        sparse, sparse_seconds = generate_answers(loaded, prompt.ids, prompt.answers), time_prefill(loaded, prompt.ids)
        explanation = explain(loaded.model)
    for (first, end), of_dense, of_sparse in zip(prompt.answers, dense, sparse, strict=True):
        print(f"code {loaded.tokenizer.decode(prompt.ids[first:end])}: dense says {of_dense}, S2O says {of_sparse}")
    remark = " (plain torch: no measure of a GPU)" if device == "cpu" else ""
    print(f"prefill: dense {dense_seconds * 1e3:.1f} ms, S2O {sparse_seconds * 1e3:.1f} ms{remark}")
    print(explanation)


def generate_answers(loaded: LoadedModel, ids: Tensor, spans: tuple[tuple[int, int], ...]) -> list[str]:
    """Generate in place of each answer, given everything before it."""
    texts = []
    for first, end in spans:
        given = ids[None, :first].to(loaded.model.device)
        mask = torch.ones_like(given)
        out = loaded.model.generate(given, attention_mask=mask, max_new_tokens=end - first, do_sample=False)
        texts.append(loaded.tokenizer.decode(out[0, first:]))
    return texts


@torch.no_grad()
def time_prefill(loaded: LoadedModel, ids: Tensor) -> float:
    """Time the second of two prefills, in seconds: the first one compiles."""
    for _ in range(2):
        began = time.perf_counter()
        loaded.model(ids[None].to(loaded.model.device), use_cache=False, logits_to_keep=1).logits.cpu()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
