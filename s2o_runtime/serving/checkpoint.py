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

from ..errors import ProfileError
from ..identity import StoredTensor, compute_sampled_fingerprint, read_stored_tensors
from ..layer_kinds import get_text_config

BUFFERS = "rotary_emb.inv_freq"  # older checkpoints have it, no model has it as a parameter
HEAD = "lm_head.weight"  # absent from a model that ties it to its embeddings, but not from every checkpoint

Renaming = tuple[tuple[str, str], ...]  # patterns, and the replacement of their matches in transformers
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
    "glm4_moe": (),
    "llama4_text": (),
    "gpt_oss": (),
}
# A layer's number: those behind the last predict further tokens (MTP), and transformers does not load them
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
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
    """The matrices of a layer's experts as one tensor, [experts, rows, columns], read as one that is stored is."""

    matrices: dict[tuple[int, int], StoredTensor]  # by expert and place below one another; all of one shape

    @property
    def shape(self) -> tuple[int, int, int]:
        """The sizes of the tensor."""
        experts, stacked = (1 + max(numbers) for numbers in zip(*self.matrices, strict=True))
        rows, columns = self.matrices[0, 0].shape
        return experts, stacked * rows, columns

    def read_elements(self, indices: range) -> Tensor:
        """Read elements of the flattened tensor."""
        _, rows, columns = self.shape
        size = math.prod(self.matrices[0, 0].shape)

        def element(index: int) -> Tensor:
            expert, index = divmod(index, rows * columns)
            matrix, index = divmod(index, size)
            return self.matrices[expert, matrix].read_elements(range(index, index + 1))

        return torch.cat([element(index) for index in indices])


def hash_checkpoint(folder: Path, config: Any) -> tuple[str, ...]:
    """Return the hashes that a profile may have of a checkpoint: by the names in its files, and by transformers'.

    Without safetensors files in the folder there are none; `config` is the model's transformers configuration.

    Raises:
        ProfileError: a file cannot be read.
    """
    try:
        layers = getattr(get_text_config(config), "num_hidden_layers", math.inf)
        stored = {
            name: tensor
            for name, tensor in _list_tensors(folder).items()
            if not name.endswith(BUFFERS) and not ((match := _LAYER.match(name)) and int(match[1]) >= layers)
        }
        tied = bool(getattr(get_text_config(config), "tie_word_embeddings", False))
        if not stored:
            return ()
        renamed = _rename_tensors(stored, config)
        hashed = _hash_tensors(stored, tied)
        return (hashed,) if renamed == stored else (hashed, _hash_tensors(renamed, tied))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise ProfileError(f"the weights in {folder} cannot be read ({error}): download them again") from error


def has_known_names(config: Any, folder: Path) -> bool:
    """Return whether `hash_checkpoint` knows the names of such a model's parameters in transformers."""
    if getattr(config, "model_type", None) in RENAMED:
        return True
    return get_text_config(config) is config and not any(".experts." in name for name in _list_tensors(folder))


def _hash_tensors(tensors: Mapping[str, StoredTensor | _Experts], tied: bool) -> str:
    kept = {name: tensor for name, tensor in tensors.items() if not (tied and name == HEAD)}
    shapes = {name: tensor.shape for name, tensor in kept.items()}
    return compute_sampled_fingerprint(shapes, lambda name, indices: kept[name].read_elements(indices))


def _rename_tensors(stored: Mapping[str, StoredTensor], config: Any) -> dict[str, StoredTensor | _Experts]:
    """Return the tensors of a checkpoint by the names of transformers 5, experts as it merges them."""
    tensors: dict[str, StoredTensor | _Experts] = {}
    merged: defaultdict[str, dict[tuple[int, int], StoredTensor]] = defaultdict(dict)
    for name, tensor in stored.items():
        for pattern, replacement in RENAMED.get(getattr(config, "model_type", ""), ()):
            name = re.sub(pattern, replacement, name)
        expert = _EXPERT.fullmatch(name)
        if expert is not None and expert["matrix"] in _MERGED:
            matrix, row = _MERGED[expert["matrix"]]
            merged[f"{expert['experts']}.{matrix}"][int(expert["number"]), row] = tensor
        else:
            tensors[name] = tensor
    return tensors | {name: _Experts(matrices) for name, matrices in merged.items()}


def _list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint's safetensors files, those of its index if it has one; none is read."""
    index, paths = folder / "model.safetensors.index.json", set(folder.glob("*.safetensors"))
    if index.exists():
        paths = {folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    return {name: tensor for path in sorted(paths) for name, tensor in read_stored_tensors(path).items()}
