"""transformers' continuous batching on a GPU: the demo model with its shipped profile, prompts in chunks."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

import vllm_engine
from calibrate.model.models import DEMO_FOLDER
from s2o_runtime import explain, patch

PROFILE = DEMO_FOLDER.parents[2] / "profiles" / "demo" / "nvidia-h200" / "rel-mse-0.001.safetensors"
KERNEL = ("s2o", "the kernel supports this call")


@torch.no_grad()
def test_needles_are_found_in_batches_of_chunks():
    """Four prompts of 32768 tokens, of which the profile computes the last chunks; other GPUs tile it anew."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    model = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.bfloat16).cuda().eval()
    patch(model, PROFILE).set_attn_implementation("paged|s2o")
    questions, codes = vllm_engine.questions(tokenizer, length=32768, count=4)
    prompts = [question["prompt_token_ids"] for question in questions]
    results = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=1024, max_batch_tokens=8192),
        progress_bar=False,
    )
    by_prompt = {tuple(result.prompt_ids): tokenizer.decode(result.generated_tokens) for result in results.values()}
    texts = [by_prompt[tuple(prompt)] for prompt in prompts]
    assert all(code in text for code, text in zip(codes, texts, strict=True)), texts
    rows = [row for row in explain(model) if (row["path"], row["reason"]) == KERNEL]
    assert {row["layer"] for row in rows} == set(range(6))
    assert min(row["density"] for row in rows) < 0.5
