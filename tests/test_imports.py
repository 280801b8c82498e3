import json
import subprocess
import sys

HEAVY = ("optuna", "sklearn", "yaml", "transformers", "calibrate", "triton", "rich", "matplotlib")


def modules_after(code: str) -> set[str]:
    program = f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in json.loads(run.stdout)}


def test_the_runtime_imports_nothing_heavy():
    assert not modules_after("import s2o_runtime").intersection(HEAVY)


def test_using_the_runtime_imports_torch_only():
    loaded = modules_after("from s2o_runtime import s2o_attention, load_profile, LayerConfig, Profile")
    assert "torch" in loaded
    # torch itself brings triton where it is installed
    assert not loaded.intersection(set(HEAVY) - modules_after("import torch"))


def test_the_command_line_imports_no_torch():
    loaded = modules_after("import calibrate.cli; calibrate.cli.parser()")
    assert not loaded.intersection({*HEAVY, "torch"} - {"calibrate"})
