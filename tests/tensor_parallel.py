"""One rank of a model that transformers splits over processes, patched: run by tests under torch.distributed.run.

    python -m torch.distributed.run --nproc-per-node 2 tests/tensor_parallel.py MODEL PROFILE LENGTH OUT

Rank 0 writes what came out to OUT.RANK: the logits, and what each layer did.
"""

import logging
import subprocess
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from s2o_runtime import patch
from s2o_runtime.huggingface.hf import get_layer_states


def run_two_ranks(folder, profile, length, out):
    """Start this program, and return what its ranks wrote."""
    flags = "-m torch.distributed.run --nproc-per-node 2 --master-port 29517"
    command = [sys.executable, *flags.split(), __file__, folder, profile, str(length), out]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return [torch.load(f"{out}.{rank}") for rank in range(2)]


def main(model_path: str, profile: str, length: int, out: str) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("s2o_runtime").addHandler(handler)
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() > 1
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = AutoModelForCausalLM.from_pretrained(model_path, tp_plan="auto", dtype=dtype).eval()
    device = next(model.parameters()).device
    ids = torch.randint(3, 100, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    patch(model, profile, strict=True)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    states = get_layer_states(model)
    torch.save(
        {
            "logits": logits.float().cpu(),
            "heads": [(state.heads.start, state.heads.stop) for state in states],
            "densities": [None if state.last is None else state.last.density.cpu() for state in states],
            "paths": [dict(state.counts) for state in states],
            "said": said,
        },
        f"{out}.{dist.get_rank()}",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
