"""Which devices are here, and whether the kernels run on them."""

from __future__ import annotations

import torch

from s2o_runtime.command_line import BAD_INPUT, NO_RESOURCE
from s2o_runtime.devices import fit, identify, interpreted
from s2o_runtime.doctor.findings import Finding

GIB = 1 << 30


def chosen_device(name: str | None) -> tuple[torch.device | None, Finding | None]:
    """The device to examine, by default a GPU if there is one; None with a finding if it is not here.

    Args:
        name: such as "cuda:1" or "cpu".
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        return None, Finding("device", repr(name), "it is not known: use cuda, cuda:N or cpu", BAD_INPUT)
    if device.type not in ("cuda", "cpu"):
        return None, Finding("device", str(device), "it is not supported: use cuda or cpu", BAD_INPUT)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        return None, Finding(
            "device", str(device), f"it is not here ({count} GPUs found): use --device cpu", NO_RESOURCE
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device, None


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
