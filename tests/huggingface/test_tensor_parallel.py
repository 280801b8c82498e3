"""A patched model split over two processes by transformers' tp_plan: each rank runs its own heads of the profile."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from s2o_runtime import patch
from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.errors import ProfileError
from s2o_runtime.huggingface import layers
from s2o_runtime.huggingface.hf import get_layer_states
from s2o_runtime.huggingface.layers import find_local_heads
from s2o_runtime.profile import save_profile
from support.models import make_profile, save
from tensor_parallel import run_two_ranks

LENGTH = 600
TILE = TileConfig(64, 32, 1, 4, 1)


@pytest.mark.exhaustive(reason="starts two processes that load a model")
def test_two_ranks_give_what_one_process_gives(tmp_path):
    """Every head has a threshold of its own, so a rank that took another's would compute other pairs."""
    pytest.importorskip("accelerate", reason="accelerate is not installed, which transformers needs for tp_plan")
    folder = save("llama", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    heads = model.config.num_attention_heads
    config = LayerConfig(tuple(HeadConfig(10.0 ** (head - 2), 64) for head in range(heads)), TILE)
    made = make_profile(model, 1.0, min_length=10)
    profile = replace(made, layers=((config,) * model.config.num_hidden_layers,) * len(made.lengths))
    save_profile(profile, tmp_path / "p.safetensors")
    patch(model, profile, strict=True)
    ids = torch.randint(3, 100, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    whole = [state.last.density for state in get_layer_states(model)]
    assert len({round(float(density), 4) for density in whole[0].flatten()}) > 2  # the heads differ
    for rank, of_rank in enumerate(run_two_ranks(folder, tmp_path / "p.safetensors", LENGTH, tmp_path / "out")):
        torch.testing.assert_close(of_rank["logits"], expected, rtol=1e-4, atol=1e-4)
        half = slice(rank * heads // 2, (rank + 1) * heads // 2)
        assert of_rank["heads"] == [(half.start, half.stop)] * len(whole)
        for mine, of_all in zip(of_rank["densities"], whole, strict=True):
            assert torch.equal(mine.flatten(), of_all.flatten()[half])
        assert all(path == "s2o" for counts in of_rank["paths"] for path, _ in counts)
        assert not [text for text in of_rank["said"] if "calibrated on" in text]  # the weights are known again


def shard(ranks, rank):
    """A module one of whose parameters says that it is split."""
    module = torch.nn.Linear(2, 2)
    module.weight.device_mesh = SimpleNamespace(size=lambda dimension: ranks, get_local_rank=lambda dimension: rank)
    module.weight.placements = (SimpleNamespace(is_shard=lambda: True),)
    return module


def test_neighbouring_heads_belong_to_a_rank():
    assert find_local_heads(torch.nn.Linear(2, 2), 8) is None
    assert find_local_heads(shard(1, 0), 8) is None
    assert [find_local_heads(shard(4, rank), 8) for rank in range(4)] == [range(n, n + 2) for n in (0, 2, 4, 6)]
    with pytest.raises(ProfileError, match="28 query heads cannot be shared by 8 ranks"):
        find_local_heads(shard(8, 0), 28)


def test_layers_on_unlike_devices_get_tiles_of_their_own(monkeypatch, tmp_path):
    """The fit is made once for every device that a layer is on."""
    model = AutoModelForCausalLM.from_pretrained(save("llama", tmp_path / "model"), dtype=torch.float32)
    profile, asked = make_profile(model, 1.0), []
    other = TileConfig(64, 64, 2, 8, 1)

    def fitted(profile, device):
        asked.append(device)
        if device.index != 1:
            return profile, None
        moved = tuple(tuple(layer.with_tile(other) for layer in bucket) for bucket in profile.layers)
        return replace(profile, layers=moved), None

    monkeypatch.setattr(layers, "adapt_to_device", fitted)
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    states = layers.make_states(profile, devices)
    assert asked == devices
    tiles = [state.config(profile.lengths[0]).tile for state in states]
    assert tiles == [profile.layers[0][0].tile, other]
