"""Score a patched model by lm-evaluation-harness: a task of needles in long prompts, dense and with S2O.

    python examples/harness_task.py [PROFILE] [TOKENS] [PROMPTS]

Needs the extra: pip install -e '.[calibrate,harness]'. The task is written here, so nothing is downloaded: which of
four codes was hidden in the prompt? docs/production.md has RULER, NIAH and LongBench.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch

from calibrate.model.models import load
from calibrate.prompts.documents import make_held_out_prompts
from s2o_runtime import explain, load_profile, patched

SHIPPED = Path(__file__).resolve().parent.parent / "profiles" / "demo" / "cpu" / "mse-0.0001.safetensors"


def main(path: Path, tokens: int, count: int) -> None:
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    try:
        import lm_eval
        from lm_eval.api.task import ConfigurableTask
        from lm_eval.models.huggingface import HFLM
    except ImportError:
        sys.exit('lm-evaluation-harness is not installed: pip install "lm_eval[hf]"')
    profile = load_profile(path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load(profile.model_name, device, resident=True)
    decode = loaded.tokenizer.decode
    prompts = make_held_out_prompts(loaded.tokenizer, tokens, count, seed=1234)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "needles.jsonl"
        lines = []
        for prompt in prompts:
            first, end = prompt.answers[0]
            code = decode(prompt.ids[first:end])
            others = [str((int(code) + shift) % 90000 + 10000) for shift in (11111, 22222, 33333)]
            lines.append(json.dumps({"prompt": decode(prompt.ids[:first]), "choices": [code, *others]}))
        file.write_text("\n".join(lines), encoding="utf-8")
        task = ConfigurableTask(
            config={
                "task": "needles",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": folder},
                "test_split": "test",
                "output_type": "multiple_choice",
                "doc_to_text": "{{prompt}}",
                "doc_to_choice": "{{choices}}",
                "doc_to_target": 0,
                "target_delimiter": "",
                "metric_list": [{"metric": "acc"}],
            }
        )
        harness = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=1, max_length=tokens + 8)
        dense = lm_eval.simple_evaluate(model=harness, tasks=[task])["results"]["needles"]["acc,none"]
        # only the choices at the prompt's end are read of all the logits that the harness asks for
        with patched(loaded.model, profile, reads="answers"):
            sparse = lm_eval.simple_evaluate(model=harness, tasks=[task])["results"]["needles"]["acc,none"]
            print(f"needles: dense {dense:.0%}, S2O {sparse:.0%} of {count} prompts")
            print(explain(loaded.model))


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED
    main(path, *map(int, sys.argv[2:4] if len(sys.argv) > 3 else (1100, 2)))
