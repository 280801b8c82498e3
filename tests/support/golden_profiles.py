"""The profiles in tests/golden: a file of every schema that is read, never made anew, and what must be found in it.

`PYTHONPATH=.:tests python tests/support/golden_profiles.py` writes those that are missing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import Profile, save_profile
from support.profiles import CERTIFICATE

FOLDER = Path(__file__).parent.parent / "golden"
VERSIONS = {"s2o": "0.1.0", "python": "3.11.7", "torch": "2.9.0", "triton": "3.6.0"}
VERSIONS |= {"transformers": "5.3.0", "optuna": "5.0.0"}


def minimal() -> Profile:
    """One bucket, one layer, one head, defaults, nothing recorded."""
    device = DeviceIdentity("cpu", "cpu")
    layers = ((LayerConfig((HeadConfig(),)),),)
    return Profile("m", Geometry("llama", 1, 1, 1, 64), "", device, (512,), layers)


def full() -> Profile:
    """Several buckets, every value that a head or layer may have in some of them, every field of a record."""
    heads = [
        HeadConfig(0.25, 256, "s2o", StopRule.REST, 1),
        HeadConfig(1e6, 256, "s2o", StopRule.PAPER, 16, "mean"),
        HeadConfig(0.0, 512, "s2o", StopRule.PAPER, 16),
        HeadConfig(0.5, 65536, "dense", StopRule.REST, 16),
        HeadConfig(2.0**-20, 128, "s2o", StopRule.REST, 16, "mean"),
        HeadConfig(2.0, 1024, "s2o", StopRule.REST, 16, "mean"),
        HeadConfig(0.125, 65536, "s2o", StopRule.PAPER, 16),
        HeadConfig(0.0, 64, "dense", StopRule.PAPER, 1, "mean"),
    ]
    tiles = [
        TileConfig(128, 64, 4, 8, 2),
        TileConfig(64, 32, 64, 4, 6, dense_below=(1 << 31) - 1, min_queries=2, tail_keys=8192),
        TileConfig(64, 128, 4, 4, 4, specialized=True, dense_below=2048, min_queries=768, tail_keys=(1 << 31) - 1),
    ]
    layers = (
        (LayerConfig(tuple(heads[:4]), tiles[0]), LayerConfig(tuple(heads[4:]), tiles[0])),
        (LayerConfig(tuple(heads[4:]), tiles[1]), LayerConfig(tuple(heads[:4]), tiles[1])),
        (
            LayerConfig(tuple(heads[:4]), tiles[2], scores="int8"),
            LayerConfig(tuple(heads[4:]), tiles[2], scores="int8"),
        ),
    )
    return Profile(
        "org/model-ü",
        Geometry("qwen2", 2, 4, 2, 128),
        "random-" + "0123456789abcdef" * 4,
        DeviceIdentity("cuda", "NVIDIA H200", (9, 0), 132, 150_000_000_000),
        (1024, 8192, 131072),
        layers,
        _record(),
    )


def other_rankings() -> Profile:
    """What is read of the same where layers had grains of 1, 2, 4 and 8, and heads 1 to 64 representatives.

    Heads that this version cannot run are dense.
    """
    of_grain_4 = (False, False), (True, False), (False, True)
    taus = (2.0**-20, 0.0)  # of heads[4] and heads[7], which had 16 representatives and 1

    def as_read(head: HeadConfig, grain_4: bool) -> HeadConfig:
        runs = grain_4 and head.tau in taus
        return head if runs else replace(head, mode="dense", tail="none", representatives=1)

    layers = tuple(
        tuple(
            replace(layer, heads=tuple(as_read(head, grain_4) for head in layer.heads))
            for layer, grain_4 in zip(bucket, grains, strict=True)
        )
        for bucket, grains in zip(full().layers, of_grain_4, strict=True)
    )
    record = _record()
    record["recipe"] |= {"representatives": [1, 32], "grains": [4]}
    return replace(full(), layers=layers, record=record)


def _record() -> dict[str, Any]:
    budget: dict[str, Any] = {"kind": "rel_mse", "value": 1e-3}
    proven = {"mse": 1e-6, "rel_mse": 5e-4, "density": 0.5, "worst": 0.25, "limit": 1e-3}
    tightened = proven | {"tightened": 1, "first_error": 2e-3}
    predicted = {"mse": 2e-6, "density": 0.5, "cost": 0.625, "seconds": 1e-3, "dense_seconds": 2e-3}
    length = {"kl": 1e-3, "top1": 0.99, "layers": [tightened, proven]}
    times = {"prefill_seconds": 0.01, "dense_prefill_seconds": 0.02}
    kind = {"timed_at": 8192, "layers": [[8192, 0], [8192, 1]], "density": 0.5, "tile": "128x64x4 w8 s2"}
    return {
        "budget": budget | {"scope": "layer"},
        "objective": "latency",
        "proof": "held out on NVIDIA H200 (sm_90, 132 SMs)",
        "problems": ["nothing was"],
        "versions": VERSIONS,
        "data": {name: [{"length": 1024, "sha256": "ab" * 32}] for name in ("calibration", "held_out", "certify")},
        "recipe": {
            "model": "org/model-ü",
            "budget": budget,
            "scope": "layer",
            "lengths": [1024, 131072],
            "check_lengths": [8192],
            "chunk": 8192,
            "prompts": ["a.jsonl"],
            "domains": None,
            "hide_needles": True,
            "num_prompts": 4,
            "held_out": 2,
            "num_certify": 19,
            "trust_remote_code": False,
            "seed": 0,
            "trials": 16,
            "margin": 0.8,
            "device": "cuda",
            "scores": ["input", "int8"],
            "segments": [256, 512, 1024],
            "tails": [False, True],
            "time_limit": None,
            "worst_rows": 0.5,
            "needles": 0.95,
            "random_weights": True,
            "allow_regression": False,
        },
        "predicted": [{"length": 1024, "layers": [predicted] * 2}],
        "held_out": [
            {"length": 1024, "calibrated": True, "needles": [7, 8]} | length | times,
            {"length": 8192, "calibrated": False} | length | times,
        ],
        "certificate": CERTIFICATE,
        "not_proven": ["nothing was left out"],
        "retiled": {
            "from": "NVIDIA H200 (sm_90, 132 SMs)",
            "to": "NVIDIA A100 (sm_80, 108 SMs)",
            "versions": VERSIONS,
            "kinds": [kind | {"seconds": 1e-3, "dense_seconds": 2e-3}],
            "dense_layers": 0,
            "note": "errors, densities and times elsewhere in this record are of NVIDIA H200",
        },
    }


def given_tokenizer() -> Profile:
    """What the record says of a tokenizer that was given, and of the mean KL on the certify prompts."""
    record = {
        "recipe": {"tokenizer": "a/folder", "per_prompt": False},
        "held_out": [{"length": 1024, "calibrated": True, "kl": 4e-3}],
        "certificate": {"lengths": [{"length": 1024, "mean_kl": 4e-3}]},
    }
    return replace(minimal(), record=record)


def ceiling() -> Profile:
    """What the record says of a budget in mse with a ceiling."""
    limit = {"mse": 5e-5, "rel_mse": 5e-3, "limit": 8e-5, "binds": "rel_mse"}
    certified = {"mean": 4e-5, "bound": 6e-5, "limit": 8e-5, "rel_mse": 4e-3, "binds": "rel_mse"}
    record = {
        "budget": {"kind": "mse", "value": 1e-4, "ceiling_rel_mse": 1e-2, "scope": "layer"},
        "held_out": [{"length": 1024, "layers": [limit]}],
        "certificate": {"lengths": [{"length": 1024, "layers": [certified]}]},
    }
    return replace(minimal(), record=record)


def mixed() -> Profile:
    """A model with layers of other kinds between those that rows are of."""
    others = (("linear_attention", 1), ("sliding_attention", 2))
    (row,) = minimal().layers[0]
    return replace(
        minimal(), geometry=Geometry("gemma3_text", 2, 1, 1, 64, (2, 4), others), layers=((row, row.as_dense()),)
    )


GOLDEN = {
    "schema8": other_rankings,
    "schema8_grain4": full,
}


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.safetensors"


def field_paths(value: Any, path: str = "") -> set[str]:
    """Where the values of a document are: {"a": [{"b": 1}]} -> {"a[].b"}; a list of plain values is one field."""
    if isinstance(value, dict):
        return {leaf for name, item in value.items() for leaf in field_paths(item, f"{path}.{name}".lstrip("."))}
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return {leaf for item in value for leaf in field_paths(item, f"{path}[]")}
    return {path}


if __name__ == "__main__":
    for name, profile in GOLDEN.items():
        if not path_of(name).exists():
            save_profile(profile(), path_of(name))
