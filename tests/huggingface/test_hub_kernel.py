"""S2O as a kernel of the Hub: what scripts/docs/hub_kernel.py builds, loaded by transformers without the Hub."""

import ast
import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import hub_kernels

from s2o_runtime import patch
from s2o_runtime.errors import S2OError
from scripts.docs.hub_kernel import build
from support.pages import ROOT

REPO = "org/s2o"
DEMO = ROOT / "calibrate" / "demo" / "model"
TAKES_KERNELS = "flash_attn_forward" in (ROOT / hub_kernels.__file__).read_text(encoding="utf-8")
# the standard library, torch with what it brings, transformers, which calls the kernel, with what it brings, and what
# only a function imports that a program calls for it
ALLOWED = {*sys.stdlib_module_names, "torch", "triton", "transformers", "safetensors", "huggingface_hub"}
ALLOWED |= {"prometheus_client"}


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    return build(tmp_path_factory.mktemp("hub"), REPO, ROOT / "profiles")


@pytest.fixture
def kernel(variant, monkeypatch):
    """The kernel as `kernels` imports it, which transformers gets without a download."""
    name = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))["id"]
    if name not in sys.modules:  # its ops are registered once in a process
        spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda repo, **_: sys.modules[name] if repo == REPO else None)
    return sys.modules[name]


def test_every_file_is_imported_and_imports_only_what_a_kernel_may(variant, kernel):
    """Itself relatively, and nothing that is only installed with S2O."""
    for path in sorted(variant.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        types = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
        tree.body = [node for node in tree.body if node not in types]
        names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
        assert {name.partition(".")[0] for name in names} <= ALLOWED, path
        parts = path.relative_to(variant).with_suffix("").parts
        importlib.import_module(".".join((kernel.__name__, *parts)))


def test_it_is_imported_where_there_is_nothing_but_torch(variant):
    """As what builds and checks kernels does; `s2o_runtime` is not there either."""
    program = f"""
import importlib.util, sys
sys.modules.update(dict.fromkeys(("s2o_runtime", "transformers", "safetensors", "huggingface_hub", "triton")))
spec = importlib.util.spec_from_file_location("kernel", r"{variant / "__init__.py"}")
sys.modules["kernel"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["kernel"])
print(sys.modules["kernel"].LayerConfig.__module__)
"""
    command = [sys.executable, "-I", "-B", "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "kernel.config\n"


def test_metadata_name_every_file_and_only_a_name_of_a_repository_is_taken(variant, tmp_path):
    metadata = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))
    # files with bytecode are of other tests, which import the kernel
    there = {p.relative_to(variant).as_posix() for p in variant.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert {*metadata["digest"]["files"], "metadata.json"} == there
    assert "catalogue/demo/nvidia-h200/rel-mse-0.001.safetensors" in there
    assert metadata["id"].isidentifier()
    assert f'"{REPO}"' in (variant.parents[1] / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text("mine")
    for repo, profiles, said in (
        ("s2o", "profiles", "expected ORG/NAME"),
        (REPO, "docs", "holds no profile"),
        (REPO, "calibrate/demo/model", "it is not an S2O profile"),
        (REPO, "profiles", "README.md exists and was not written by S2O"),
    ):
        with pytest.raises(S2OError, match=said):
            build(tmp_path, repo, ROOT / profiles)
    assert list(tmp_path.iterdir()) == [tmp_path / "README.md"]


@torch.no_grad()
@pytest.mark.skipif(not TAKES_KERNELS, reason="this transformers takes no attention function from a kernel")
def test_a_model_that_names_the_kernel_computes_what_patch_gives(kernel, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # no profiles/ but the kernel's own
    hub = AutoModelForCausalLM.from_pretrained(DEMO, attn_implementation=REPO, allow_all_kernels=True)
    patched = patch(AutoModelForCausalLM.from_pretrained(DEMO), ROOT / "profiles/demo/cpu/mse-0.0001.safetensors")
    vocabulary = hub.config.vocab_size
    first, turn = torch.randint(3, vocabulary, (1, 1100)), torch.randint(3, vocabulary, (1, 64))
    batch, mask = torch.randint(3, vocabulary, (2, 1100)), torch.ones(2, 1100, dtype=torch.long)
    mask[1, :60] = 0
    outputs = []
    for model in (hub, patched):
        cold = model(first, use_cache=True)
        behind = model(turn, past_key_values=cold.past_key_values)
        outputs.append((cold.logits, behind.logits, model(batch, attention_mask=mask).logits))
    for ours, theirs in zip(*outputs, strict=True):
        assert torch.equal(ours, theirs)
    assert hub.config._attn_implementation == REPO
    assert {row["path"] for row in kernel.explain(hub)} == {"s2o"}
