"""What scripts/docs/errors.py does to provoke errors, by topic: Python expressions and commands."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROFILE = ROOT / "profiles" / "demo" / "cpu" / "mse-0.0001.safetensors"
DEMO = ROOT / "calibrate" / "demo" / "model"
QUICK = "--model demo --lengths 512 --segments 256 --device cpu --dry-run"

# what expressions use besides the public names of s2o_runtime, by module
NAMES = {
    "calibrate": ("calibrate",),
    "calibrate.prompts.files": ("read_documents",),
    "s2o_runtime.baselines.settings": ("parse",),
    "s2o_runtime.config": ("StopRule",),
    "s2o_runtime.huggingface.drift": ("allowed_errors", "check_of"),
    "s2o_runtime.huggingface.environment": ("check_trained",),
    "s2o_runtime.huggingface.layers": ("check_beyond",),
    "s2o_runtime.identity": ("geometry",),
    "s2o_runtime.profile.record": ("Record",),
    "s2o_runtime.serving.fit": ("Rank", "check_model"),
    "s2o_runtime.vllm.settings": ("settings_of",),
    "transformers": ("BertConfig", "MistralConfig"),
}

CASES: dict[str, tuple[str, ...]] = {
    "Settings of heads, layers and tiles": (
        "LayerConfig.uniform(4, tau=-1.0).validate()",
        "LayerConfig.uniform(4, tau=0.3, segment=32).validate()",
        "LayerConfig.uniform(4, tau=0.3, segment=100).validate()",
        "LayerConfig.uniform(4, tau=0.3, representatives=3).validate()",
        "LayerConfig.uniform(4, tau=0.3, tail='yes').validate()",
        "LayerConfig.uniform(4, mode='sparse').validate()",
        "LayerConfig.uniform(4, mode='baseline').validate()",
        "LayerConfig.uniform(4, tau=0.3, stop_rule='often').validate()",
        "StopRule.parse('often')",
        "LayerConfig(()).validate()",
        "LayerConfig.uniform(4, tau=0.3, grain=3).validate()",
        "LayerConfig.uniform(4, tau=0.3, row_reduce='sum').validate()",
        "LayerConfig.uniform(4, tau=0.3, segment=64, tile=TileConfig(128, 32, 8, 8, 3)).validate()",
        "TileConfig(100, 32, 1, 4, 1).validate()",
        "TileConfig(64, 32, 0, 4, 1).validate()",
        "TileConfig(128, 32, 1, 4, 1).validate()",
        "TileConfig(64, 32, 1, 4, 1, specialized=1).validate()",
        "TileConfig(64, 32, 1, 4, 1, dense_below=-1).validate()",
        "TileConfig(64, 32, 1, 4, 1, min_queries=1).validate()",
        "parse('magic:keep=0.9')",
        "parse('pbs:keep')",
        "parse('pbs:depth=3')",
        "parse('pbs:keep=0.9,keep=0.8')",
        "parse('pbs:keep=2')",
    ),
    "The attention op": (
        "s2o_attention(q[0], k, v, config)",
        "s2o_attention(q.int(), k, v, config)",
        "s2o_attention(q, k.half(), v, config)",
        "s2o_attention(q, k[..., :32], v, config)",
        "s2o_attention(q, k, v[:, :1], config)",
        "s2o_attention(q[:, :3], k, v, config)",
        "s2o_attention(q, k[:, :, :100], v[:, :, :100], config)",
        "s2o_attention(q[:, :, :0], k, v, config)",
        "s2o_attention(q, k, v, LayerConfig.uniform(8, tau=0.3, segment=128))",
        "s2o_attention(q, k, v, config, kv_start=torch.zeros(2, dtype=torch.int32))",
        "s2o_attention(q, k, v, config, scale=-1.0)",
        "s2o_attention(q, k, v, config, softcap=0.0)",
        "s2o_attention(q, k, v, config, sinks=torch.zeros(3))",
        "s2o_attention(q, k, v, config, backend='fast')",
        "s2o_attention(torch.zeros(1, 4, 256, 320), torch.zeros(1, 2, 256, 320), v, config, backend='triton')",
        "s2o_attention(q, k, v, config, return_lse=True).density",
        "s2o_attention_varlen(q, k, v, edges, edges, 256, 256, config)",
        "s2o_attention_varlen(*packed, edges.long(), edges, 256, 256, config)",
        "s2o_attention_varlen(*packed, edges, edges[:1], 256, 256, config)",
        "s2o_attention_varlen(*packed, edges, edges, 256, 128, config)",
    ),
    "Profiles and models": (
        "load_profile('nowhere.safetensors')",
        "load_profile('plain.safetensors')",
        "load_profile('cut.safetensors')",
        "load_profile('changed.safetensors')",
        "replace(profile, lengths=()).validate()",
        "replace(profile, lengths=(2048, 1536, 1024)).validate()",
        "replace(profile, lengths=(0, 1536, 2048)).validate()",
        "replace(profile, lengths=(2000, 2024, 2048)).validate()",
        "replace(profile, layers=profile.layers[:1]).validate()",
        "replace(profile, layers=(profile.layers[0][:2],) * 3).validate()",
        "patch(torch.nn.Linear(2, 2), profile)",
        "patch(llama, profile)",
        "explain(llama)",
        "check_beyond('further')",
        "check_of('hourly')",
        "DriftCheck(every=0).validate()",
        "DriftCheck(action='stop').validate()",
        "DriftCheck(margin=0.0).validate()",
        "allowed_errors(replace(profile, record=Record()))",
        "check_trained(replace(profile, fingerprint='random-1'))",
        "geometry(BertConfig(is_encoder_decoder=True))",
        "geometry(MistralConfig(sliding_window=64, max_position_embeddings=128))",
    ),
    "vLLM": (
        "settings_of({})",
        "settings_of({'s2o': 'p.safetensors'})",
        "settings_of({'s2o': {'profil': 'p.safetensors'}})",
        "settings_of({'s2o': {'profile': 'p.safetensors', 'beyond': 'far'}})",
        "settings_of({'s2o': {'profile': 'p.safetensors', 'drift': 'hourly'}})",
        "settings_of({'s2o': {'profile': 'p.safetensors', 'strict': 'no'}})",
        "settings_of({'s2o': {'profile': 'p.safetensors', 'metrics_port': 0}})",
        "settings_of({'s2o': {'profile': 'p.safetensors', 'metrics_port': 9100, 'metrics_host': ''}})",
        "settings_of({'s2o': {'profile': 'p.safetensors', 'log_every': -1}})",
        "Rank(0, 3).heads(8)",
        "check_model(profile, llama.config, None)",
    ),
    "s2o-calibrate": (
        "s2o-calibrate --lengths 512",
        "s2o-calibrate --model qwen2.5-7bb --lengths 512 --segments 256 --device cpu --dry-run",
        "s2o-calibrate --model . --lengths 512 --segments 256 --device cpu --dry-run",
        "s2o-calibrate --model windows --lengths 512 --segments 256 --device cpu --dry-run",
        "s2o-calibrate --model wide --lengths 512 --segments 256 --device cpu --dry-run",
        "s2o-calibrate --model own-code --lengths 512 --segments 256 --device cpu --dry-run",
        "s2o-calibrate --model demo --lengths 8k",
        "s2o-calibrate --model demo --lengths 100 --device cpu --dry-run",
        "s2o-calibrate --model demo --lengths 262144 --device cpu --dry-run",
        "s2o-calibrate --model demo --trials 0",
        "s2o-calibrate --model demo --budget-mse 1 --budget-kl 1",
        "s2o-calibrate --model demo --budget-kl 1e-3 --budget-scope layer",
        "s2o-calibrate --model demo --domains code,code",
        f"s2o-calibrate {QUICK} --check-lengths 512",
        f"s2o-calibrate {QUICK} --device tpu",
        f"s2o-calibrate {QUICK} --device meta",
        f"s2o-calibrate {QUICK} --out .",
        f"s2o-calibrate {QUICK} --out text.jsonl/p.safetensors",
        f"s2o-calibrate {QUICK} --out p --journal p",
        f"s2o-calibrate {QUICK} --prompts none.jsonl",
        f"s2o-calibrate {QUICK} --recipe none.yaml",
        f"s2o-calibrate {QUICK} --recipe list.yaml",
        f"s2o-calibrate {QUICK} --recipe typo.yaml",
        "s2o-calibrate --model demo --yaml",
        "s2o-calibrate --model demo --random-wieghts",
        "calibrate('demo', tokenizer=object(), out='x.safetensors')",
        "calibrate('demo', budgets=1)",
        "read_documents([Path('broken.jsonl')])",
        "read_documents([Path('cut.jsonl')])",
        "read_documents([Path('empty.md')])",
        "read_documents([Path('empty-folder')])",
    ),
    "s2o-profile": (
        "s2o-profile",
        "s2o-profile show none.safetensors",
        "s2o-profile show p.safetensors --head 3",
        "s2o-profile show p.safetensors --head 9.9",
        "s2o-profile rebudget p.safetensors",
        "s2o-profile rebudget p.safetensors --budget-mse 1e-3",
        "s2o-profile verify p.safetensors",
        "s2o-profile push p.safetensors hf://org/name --catalogue",
        "s2o-profile push p.safetensors hf://name",
        "s2o-profile pull empty-folder",
    ),
    "s2o-eval": (
        "s2o-eval --model demo",
        "s2o-eval --out-dir out",
        "s2o-eval --model demo --out-dir text.jsonl",
        "s2o-eval --model demo --out-dir out --profile none.safetensors",
        "s2o-eval --model demo --out-dir out --profile p.safetensors --profile p.safetensors",
        "s2o-eval --model demo --out-dir out --tasks prompts",
        "s2o-eval --model demo --out-dir out --prompts none.jsonl",
        "s2o-eval --model demo --out-dir out --setting segment=256",
        "s2o-eval --model demo --out-dir out --setting tau=0.3,tau=0.2",
        "s2o-eval --model demo --out-dir out --setting tau=0.3,depth=2",
        "s2o-eval --model demo --out-dir out --lengths 262144 --device cpu",
        "s2o-eval --model demo --out-dir out --lengths 512 --device cpu --dry-run --prompts broken.jsonl",
    ),
}


def prepare(folder: Path) -> None:
    """The files that cases name: a good profile, bad ones, prompts, recipes and models' folders."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, MistralConfig

    shutil.copy(PROFILE, folder / "p.safetensors")
    good = PROFILE.read_bytes()
    (folder / "cut.safetensors").write_bytes(good[: len(good) // 2])
    (folder / "changed.safetensors").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    save_file({"weight": torch.zeros(2)}, folder / "plain.safetensors")
    (folder / "text.jsonl").write_text('{"text": "a"}\n')
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    (folder / "cut.jsonl").write_text('{"text": \n')
    (folder / "empty.md").touch()
    (folder / "empty-folder").mkdir()
    (folder / "list.yaml").write_text("- trials\n")
    (folder / "typo.yaml").write_text("trails: 3\n")
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    configs: dict[str, dict[str, Any]] = {
        "windows": MistralConfig(**sizes, sliding_window=64).to_dict(),
        "wide": LlamaConfig(**sizes, head_dim=288).to_dict(),
        "own-code": {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}},
    }
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "own-code" / "configuration_own.py").write_text("raise SystemExit\n")


def namespace() -> dict[str, Any]:
    """The names that the expressions of `CASES` use."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import s2o_runtime

    names = {name: getattr(import_module(module), name) for module, of in NAMES.items() for name in of}
    names |= {name: getattr(s2o_runtime, name) for name in s2o_runtime.__all__}
    q, k, v = (torch.zeros(1, heads, 256, 64) for heads in (4, 2, 2))
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    return names | {
        "torch": torch,
        "q": q,
        "k": k,
        "v": v,
        "packed": [tensor[0].transpose(0, 1) for tensor in (q, k, v)],
        "config": s2o_runtime.LayerConfig.uniform(4, tau=0.3, segment=128),
        "edges": torch.tensor([0, 256], dtype=torch.int32),
        "profile": s2o_runtime.load_profile(PROFILE),
        "llama": AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=128)).eval(),
        "replace": replace,
        "Path": Path,
    }
