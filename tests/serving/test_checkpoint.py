"""The weights of a checkpoint are known by a few elements of its files."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from calibrate.model.weights import get_model_class
from s2o_runtime.errors import ProfileError
from s2o_runtime.identity import BASE, ROPE, STORED_TYPES, fingerprint, read_stored_tensors, read_tensor_bytes
from s2o_runtime.serving.checkpoint import hash_checkpoint
from support.architectures import CASES


@pytest.mark.parametrize("name", STORED_TYPES)
def test_elements_of_a_stored_tensor_are_those_of_the_flattened_one(name, tmp_path):
    dtype = getattr(torch, STORED_TYPES[name], None)
    if dtype is None:
        pytest.skip(f"this torch has no {STORED_TYPES[name]}")
    values = torch.randint(0, 2, (3, 4, 5), generator=torch.Generator().manual_seed(0)).float().to(dtype)
    tensors = {"cube": values, "vector": values.reshape(-1)[:7].clone(), "scalar": values[0, 0, 0].clone()}
    save_file({**tensors, "before": torch.ones(3, dtype=torch.uint8)}, tmp_path / "model.safetensors", {"made": "here"})
    stored = read_stored_tensors(tmp_path / "model.safetensors")
    for key, tensor in tensors.items():
        assert (stored[key].dtype, stored[key].shape) == (name, tuple(tensor.shape))
        for indices in (range(tensor.numel()), range(0, tensor.numel(), 3), range(tensor.numel() - 1, tensor.numel())):
            elements = stored[key].read_elements(indices)
            assert elements.dtype == dtype
            expected = tensor.reshape(-1)[indices.start : indices.stop : indices.step]
            assert read_tensor_bytes(elements) == read_tensor_bytes(expected)


def test_a_checkpoint_of_several_types_and_of_experts_has_the_hash_of_its_model(tmp_path):
    """Whatever type it is loaded in, and without an open file behind it."""
    config = CASES["mixtral"].config
    model = get_model_class(config).from_config(config)
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    for index, weights in enumerate(model.parameters()):
        torch.nn.init.normal_(weights, std=0.25)
        weights.data = weights.data.to(dtypes[index % len(dtypes)])
    model.save_pretrained(tmp_path)
    stored = read_stored_tensors(tmp_path / "model.safetensors").values()
    assert {tensor.dtype for tensor in stored} == {"F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
    loaded = get_model_class(config).from_pretrained(tmp_path, dtype=torch.float32)
    files = len(os.listdir("/proc/self/fd"))
    _, as_transformers = hash_checkpoint(tmp_path, config)
    assert len(os.listdir("/proc/self/fd")) == files
    assert as_transformers.partition(BASE)[0] == fingerprint(loaded).partition(ROPE)[0]


def written(entry, data=b"\x00" * 8):
    header = json.dumps({"model.norm.weight": entry}).encode()
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (b"", ".+"),
        ((2).to_bytes(8, "little") + b"[]", ".+"),
        (written({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, b"\x00" * 7), ".+"),
        (written({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}), ".+"),
        (written({"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}), ".*F31.*"),
        (written({"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}), "torch has no type F4"),
    ],
    ids=["empty", "no names", "cut off", "other sizes", "unknown type", "a type that torch has not"],
)
def test_a_file_that_cannot_be_read_is_one_sentence(contents, reason, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(contents)
    message = rf"^the weights in .* cannot be read \({reason}\): download them again$"
    with pytest.raises(ProfileError, match=message):
        hash_checkpoint(tmp_path, CASES["llama"].config)


def test_a_file_that_is_cut_off_later_is_noticed(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"vector": torch.ones(4)}, path)
    tensor = read_stored_tensors(path)["vector"]
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match="buffer"):
        tensor.read_elements(range(4))
