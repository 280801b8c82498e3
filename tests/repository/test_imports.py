"""Tests of which room may import which: down only, and no circle of files."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from support.pages import ROOT

# From the bottom up: a file imports only from rooms before its own, or other files of its room.
# __init__ is what users import: names from all rooms, loaded on first use.
RUNTIME = [
    "version", "lazy", "errors", "fields", "logs", "command_line", "files", "lengths", "dense_reason",
    "config", "layer_kinds", "identity", "quantisation", "sequences", "call", "tiles", "devices",
    "reference", "kernels", "attention", "profile", "monitor", "serving", "huggingface", "vllm", "sglang",
    "doctor", "__init__",
]  # fmt: skip
CALIBRATE = [
    "versions", "timing", "compiling", "tables", "journal", "options", "record", "recipe", "machine", "progress",
    "model", "prompts", "work", "curves", "search", "profiles", "proof", "pipeline", "report", "api", "evaluation",
    "commands", "__init__",
]  # fmt: skip
ROOMS = [("s2o_runtime", room) for room in RUNTIME] + [("calibrate", room) for room in CALIBRATE]


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


MODULES = {
    module_name(path): path
    for package in ("s2o_runtime", "calibrate")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.name != "sitecustomize.py"  # found by Python itself, in programs that s2o-run starts
}


def room_of(module):
    package, _, rest = module.partition(".")
    return package, rest.partition(".")[0] or "__init__"


@cache
def imports_of(module):
    """The project's modules that a module imports anywhere in it: at its top, in functions, for its types."""
    imported = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            folder = MODULES[module].relative_to(ROOT).parts[: -node.level] if node.level else ()
            source, names = ".".join([*folder, *filter(None, [node.module])]), {alias.name for alias in node.names}
            submodules = {name for name in names if f"{source}.{name}" in MODULES}
            imported |= {f"{source}.{name}" for name in submodules} | ({source} if names - submodules else set())
    known = {name if name in MODULES else f"{name}.__init__" for name in imported}
    return {name for name in known if name in MODULES and name != module}


def test_the_runtime_imports_itself_relatively():
    """A folder of the runtime's files works under another name then, as a kernel of the hub has one."""
    absolute = [module for module in MODULES if "s2o_runtime" in imported_by(MODULES[module])]
    assert not [module for module in absolute if module.startswith("s2o_runtime")]


def test_no_file_imports_from_a_room_above_its_own():
    upward = [
        f"{module} -> {imported}"
        for module in MODULES
        for imported in sorted(imports_of(module))
        if ROOMS.index(room_of(imported)) > ROOMS.index(room_of(module))
    ]
    assert not upward


def test_no_circle_of_files():
    TopologicalSorter({module: imports_of(module) for module in MODULES}).prepare()  # raises what names a circle


HEAVY = {"optuna", "sklearn", "yaml", "transformers", "triton", "rich", "matplotlib"}


def test_the_command_line_and_what_reads_a_record_import_no_torch():
    commands = [f"calibrate.commands.{name}" for name in ("calibrate", "profile", "evaluate")]
    parsers = "; ".join(f"import {name}; {name}.build_parser()" for name in (*commands, "s2o_runtime.doctor.command"))
    program = f"import calibrate; calibrate.Recipe, calibrate.calibrate; {parsers}; import s2o_runtime.profile.record"
    program += "; import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {*run.stdout.split()} & {*HEAVY, "torch"}


def imported_by(path: Path) -> set[str]:
    """The first names of the modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def test_no_test_file_imports_another():
    """Anything that several of them need is in tests/support."""
    test_files = {path.stem: path for path in Path(__file__).parents[1].rglob("test_*.py")}
    upward = {name: imported_by(path) & {*test_files, "conftest"} for name, path in test_files.items()}
    assert not {name: modules for name, modules in upward.items() if modules}


def test_only_evaluations_import_scripts():
    """Of a clone, for other papers' methods: an installed package does not have them."""
    importing = {module for module, path in MODULES.items() if "scripts" in imported_by(path)}
    assert importing == {"calibrate.evaluation.plan", "calibrate.evaluation.run"}


def test_what_programs_of_other_environments_import_is_there():
    """Those beside the tests' rooms, such as sglang_engine.py, run with packages that these tests do not have."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").glob("*.py")]
    froms = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    ours = [node for node in froms if node.module.partition(".")[0] in ("s2o_runtime", "calibrate", "vllm_engine")]
    assert len(ours) > 10
    for node in ours:
        exec(ast.unparse(node), {})
