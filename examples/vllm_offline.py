"""Run vLLM without a server: `LLM.generate` with S2O as the attention backend.

    python examples/vllm_offline.py MODEL PROFILE [TOKENS]

Needs vLLM, with S2O installed in its environment, and a GPU. `make vllm` runs the same on a CPU with the demo model.
"""

from __future__ import annotations

import sys

from calibrate.prompts.documents import make_held_out_prompts
from s2o_runtime import load_profile


def main(model: str, profile_path: str, tokens: int | None = None) -> None:
    try:
        from vllm import LLM, SamplingParams
    except ImportError:
        sys.exit("vLLM is not installed: pip install vllm, then pip install . in this repository")
    from transformers import AutoTokenizer

    profile = load_profile(profile_path)
    length = tokens or profile.lengths[-1]
    prompt = make_held_out_prompts(AutoTokenizer.from_pretrained(model), length, 1, seed=1234)[0]
    first, end = prompt.answers[0]
    engine = LLM(
        model=model,
        max_model_len=length + 16,
        attention_backend="S2O",  # vLLM 0.29 and older: "CUSTOM"
        additional_config={"s2o": {"profile": profile_path}},
    )
    settings = SamplingParams(temperature=0, max_tokens=end - first)
    output = engine.generate({"prompt_token_ids": prompt.ids[:first].tolist()}, settings)[0]
    print(f"answers {output.outputs[0].text!r}, expected {engine.get_tokenizer().decode(prompt.ids[first:end])!r}")
    print("the log says which rows ran S2O: look for 'S2O:' every log_every seconds, or at the metrics")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(str(__doc__))
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:4]))
