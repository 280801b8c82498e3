"""A budget in what the model's predictions may change by: KL in nats per token.

    python examples/kl_budget.py [KL] [PROFILE]

A pass through the model tries what heads may spend, until the KL of the patched model on the prompts that layers are
adjusted on is within the budget. Takes about a minute on a CPU, for the demo model at 1024 tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

from calibrate import calibrate
from calibrate.record import read_record


def main(kl: float, out: Path) -> None:
    result = calibrate(
        "demo",
        budget_kl=kl,
        lengths=(1024,),
        num_prompts=2,
        num_held_out=1,
        num_certify=0,
        trials=2,
        out=out,
        progress=False,
    )
    print("written" if result.written else f"not written: {'; '.join(map(str, result.problems))}")
    for proof in read_record(result.profile).held_out:
        print(f"{proof.length} tokens: KL {proof.kl:.1e} nats, budget {kl:g}, top-1 the same {proof.top1:.1%}")


if __name__ == "__main__":
    main(
        float(sys.argv[1]) if len(sys.argv) > 1 else 2e-2,
        Path(sys.argv[2]) if len(sys.argv) > 2 else Path("build/kl.safetensors"),
    )
