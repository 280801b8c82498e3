import pytest
import torch

from calibrate.model import estimate
from calibrate.model.estimate import find_longest_length, free_memory, within_memory
from s2o_runtime.errors import ResourceError

GIB = 1 << 30


def test_what_fits():
    assert find_longest_length(131072, 40 * GIB, 10 * GIB, 25 * GIB) == int(0.9 * 0.5 * 131072) // 1024 * 1024
    assert find_longest_length(131072, 40 * GIB, 30 * GIB, 25 * GIB) == 1024  # not even the weights do
    assert find_longest_length(8192, 10 * GIB, 0, 24 * GIB) == 7168  # fragmented: less than was tried all the same


def test_it_is_one_sentence_with_a_length(monkeypatch):
    class Properties:
        total_memory = 24 * GIB

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 22 * GIB)
    text = (
        "24.0 GiB of GPU memory ran out while measuring layer 3 at 131072 tokens, one layer and one prompt at a time: "
        "about 94208 tokens fit, use shorter --lengths or fewer --num-prompts; what was measured is kept"
    )
    with (
        pytest.raises(ResourceError, match=text),
        within_memory(torch.device("cuda"), 131072, 0, "measuring layer 3"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")
    with within_memory(torch.device("cuda"), 1, 0, ""):
        pass
    assert estimate.STEP == 1024


def test_free_memory_is_what_torch_does_not_use(monkeypatch):
    assert free_memory(torch.device("cpu")) == 0
    for name, value in {"mem_get_info": (1000, 5000), "memory_reserved": 600, "memory_allocated": 250}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free_memory(torch.device("cuda")) == 1350
