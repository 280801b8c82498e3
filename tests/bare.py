"""Tests of the runtime in an environment with little in it, run by `make bare`.

    python bare.py op PROFILE             with torch, triton and safetensors alone
    python bare.py patch PROFILE MODEL    with transformers beside them, which brings numpy

PROFILE is one of the demo model, MODEL the folder with the demo model.
"""

import importlib.util
import sys

import torch

import s2o_runtime
from s2o_runtime import load_profile, s2o_attention


def check_op(profile_path: str) -> None:
    """A profile is read, and the op runs with the configuration of each of its layers."""
    for name in ("numpy", "transformers", "optuna"):
        assert importlib.util.find_spec(name) is None, f"{name} is installed: expected an environment without it"
    profile = load_profile(profile_path)
    shape, length = profile.geometry, profile.min_length
    q = torch.randn(1, shape.query_heads, length, shape.head_dim)
    k, v = (torch.randn(1, shape.kv_heads, length, shape.head_dim) for _ in range(2))
    for layer in range(shape.layers):
        out, _, stats = s2o_attention(q, k, v, profile.layer_config(layer, length), return_stats=True)
        assert out.isfinite().all()
        assert out.shape == q.shape
        assert 0 < stats.density.min() <= stats.density.max() <= 1


def check_patch(profile_path: str, model_folder: str) -> None:
    """The demo model runs with the profile, S2O changes what it computes and leaving restores it."""
    from transformers import AutoModelForCausalLM

    from s2o_runtime import explain, patched  # these import transformers

    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="sdpa").eval()
    ids = torch.randint(3, 256, (1, load_profile(profile_path).min_length))
    with torch.no_grad():
        dense = model(ids).logits
        with patched(model, profile_path):
            sparse = model(ids).logits
            assert any(row["path"] == "s2o" for row in explain(model))
        assert model(ids).logits.equal(dense)
    assert sparse.isfinite().all()
    assert not sparse.equal(dense)


torch.manual_seed(0)
assert "site-packages" in s2o_runtime.__file__, f"{s2o_runtime.__file__} is not installed: expected the wheel's"
{"op": check_op, "patch": check_patch}[sys.argv[1]](*sys.argv[2:])
print(f"{sys.argv[1]}: as expected")
