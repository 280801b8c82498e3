"""Compare a served checkpoint with the calibrated one."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from s2o_runtime.errors import ProfileError
from s2o_runtime.identity import StoredTensor, sampled_fingerprint, stored_tensors
from s2o_runtime.layer_kinds import text_config

BUFFERS = "rotary_emb.inv_freq"  # older checkpoints have it, no model has it as a parameter
HEAD = "lm_head.weight"  # absent from a model that ties it to its embeddings, but not from every checkpoint

Renaming = tuple[tuple[str, str], ...]  # patterns, and what transformers has in the place of what they match
_IMAGES_BESIDE: Renaming = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^(vision_tower|multi_modal_projector)\.", r"model.\1."),
)
_IMAGES_AMONG: Renaming = (
    (r"^model\.(?!language_model\.|visual\.)", "model.language_model."),
    (r"^visual\.", "model.visual."),
)
# How transformers names the parameters of models that read images, or that have experts, by the model's type. Of other
# such models it is not known here; those of text without experts are named as they are stored.
RENAMED: dict[str, Renaming] = {
    "gemma3": _IMAGES_BESIDE,
    "mistral3": _IMAGES_BESIDE,
    "qwen2_5_vl": _IMAGES_AMONG,
    "qwen3_vl": (),
    "mixtral": ((r"\.block_sparse_moe\.", ".mlp."),),
    "qwen2_moe": (),
    "qwen3_moe": (),
    "qwen3_next": (),
    "deepseek_v3": (),
    "llama4_text": (),
    "gpt_oss": (),
}
# One expert's matrix, which transformers stores behind and above those of the layer's other experts
_EXPERT = re.compile(r"(?P<experts>.+\.mlp\.experts)\.(?P<number>\d+)\.(?P<matrix>\w+)\.weight")
_MERGED = {
    "gate_proj": ("gate_up_proj", 0),
    "w1": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "w3": ("gate_up_proj", 1),
    "down_proj": ("down_proj", 0),
    "w2": ("down_proj", 0),
}


@dataclass
class _Experts:
    """The matrices of a layer's experts as one tensor, [experts, rows, columns], read as one that is stored is.

    Attributes:
        matrices: by expert and place, those of one expert one below another; all of one shape.
    """

    matrices: dict[tuple[int, int], StoredTensor]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The sizes of the tensor."""
        experts, stacked = (1 + max(numbers) for numbers in zip(*self.matrices, strict=True))
        rows, columns = self.matrices[0, 0].shape
        return experts, stacked * rows, columns

    def elements(self, indices: range) -> Tensor:
        """Elements of the flattened tensor."""
        _, rows, columns = self.shape
        size = math.prod(self.matrices[0, 0].shape)

        def element(index: int) -> Tensor:
            expert, index = divmod(index, rows * columns)
            matrix, index = divmod(index, size)
            return self.matrices[expert, matrix].elements(range(index, index + 1))

        return torch.cat([element(index) for index in indices])


def checkpoint_hashes(folder: Path, config: Any) -> tuple[str, ...]:
    """The hashes that a profile may have of a checkpoint's weights: by the names in its files, and by transformers'.

    Args:
        folder: with safetensors files; without any there are no hashes.
        config: the model's transformers configuration.

    Raises:
        ProfileError: a file cannot be read.
    """
    try:
        stored = {name: part for name, part in _stored(folder).items() if not name.endswith(BUFFERS)}
        tied = bool(getattr(text_config(config), "tie_word_embeddings", False))
        if not stored:
            return ()
        renamed = _as_transformers(stored, config)
        return (_hash(stored, tied), *(() if renamed == stored else (_hash(renamed, tied),)))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise ProfileError(f"the weights in {folder} cannot be read ({error}): download them again") from error


def local_folder(model: object, revision: str | None = None) -> Path | None:
    """The folder of a served model's weights, by its path or hub id; None if it is not on this machine."""
    folder = Path(str(model))
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(model), revision=revision, local_files_only=True))
    except (ImportError, OSError, ValueError):  # not downloaded, or by another way
        return None


def names_are_known(config: Any, folder: Path) -> bool:
    """Whether `checkpoint_hashes` knows how transformers names the parameters of such a model.

    Args:
        config: the model's transformers configuration.
        folder: with its safetensors files.
    """
    if getattr(config, "model_type", None) in RENAMED:
        return True
    return text_config(config) is config and not any(".experts." in name for name in _stored(folder))


def _hash(tensors: Mapping[str, StoredTensor | _Experts], tied: bool) -> str:
    kept = {name: part for name, part in tensors.items() if not (tied and name == HEAD)}
    shapes = {name: part.shape for name, part in kept.items()}
    return sampled_fingerprint(shapes, lambda name, indices: kept[name].elements(indices))


def _as_transformers(stored: Mapping[str, StoredTensor], config: Any) -> dict[str, StoredTensor | _Experts]:
    """The tensors of a checkpoint by the names of transformers 5, experts as it merges them."""
    tensors: dict[str, StoredTensor | _Experts] = {}
    merged: defaultdict[str, dict[tuple[int, int], StoredTensor]] = defaultdict(dict)
    for name, part in stored.items():
        for pattern, replacement in RENAMED.get(getattr(config, "model_type", ""), ()):
            name = re.sub(pattern, replacement, name)
        expert = _EXPERT.fullmatch(name)
        if expert is not None and expert["matrix"] in _MERGED:
            matrix, place = _MERGED[expert["matrix"]]
            merged[f"{expert['experts']}.{matrix}"][int(expert["number"]), place] = part
        else:
            tensors[name] = part
    return tensors | {name: _Experts(matrices) for name, matrices in merged.items()}


def _stored(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, none of them read."""
    return {name: tensor for path in _files(folder) for name, tensor in stored_tensors(path).items()}


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, those of its index if it has one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({folder / name for name in names})
    return sorted(folder.glob("*.safetensors"))
