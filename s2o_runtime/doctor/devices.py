"""Which devices are here, and whether the kernels run on them."""

from __future__ import annotations

import torch

from s2o_runtime.command_line import NO_RESOURCE
from s2o_runtime.devices import fit, identify, interpreted
from s2o_runtime.doctor.findings import Finding

GIB = 1 << 30


def device_findings(device: torch.device) -> list[Finding]:
    """The device, its memory, and whether the kernels are made for it."""
    here = identify(device)
    if here.kind == "cpu":
        advice = (
            "the kernels need an NVIDIA GPU; S2O runs in plain torch here, which shows what is skipped, not how fast"
        )
        return [Finding("device", "cpu", advice)]
    free, total = torch.cuda.mem_get_info(device)
    findings = [
        Finding("device", f"{device}: {here}"),
        Finding("memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"),
    ]
    verdict = fit(here, here)
    if verdict.tiles is None:
        findings[0] = Finding("device", f"{device}: {here}", verdict.reason, NO_RESOURCE)
    if interpreted():
        findings.append(
            Finding(
                "interpreter", "on", "TRITON_INTERPRET=1 runs kernels in Python, thousands of times slower: unset it"
            )
        )
    return findings
