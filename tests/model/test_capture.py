"""The calibrator captures, layer by layer, what a normal forward pass hands to attention."""

from itertools import islice

import pytest
import torch

from calibrate.model import layers
from s2o_runtime import patch
from s2o_runtime.call import Scoring
from s2o_runtime.config import LayerConfig
from s2o_runtime.errors import ModelError
from s2o_runtime.huggingface.hf import get_layer_states
from support.marks import all_but_first
from support.models import ARCHITECTURES, make_profile, save, stream
from support.naive import naive_attention

SLOW = pytest.mark.slow(reason="further architectures")
PROMPTS = [torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(length)) for length in (150, 60)]


@pytest.fixture(params=all_but_first(ARCHITECTURES, SLOW), scope="module")
def folder(request, tmp_path_factory):
    return save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "streamed"])
def test_layers_see_what_the_whole_model_sees(folder, resident):
    captured = [list(of_layer) for of_layer in layers.capture_layers(stream(folder, resident), PROMPTS)]
    model = stream(folder, True).model
    patch(model, make_profile(model, 0.0, min_length=10))
    seen = {}
    for state in get_layer_states(model):
        state.observer = lambda layer, q, k, v, scoring, out: seen.update({layer: (q, k, v, scoring.scale)})
    for number, ids in enumerate(PROMPTS):
        seen.clear()
        with torch.no_grad():
            model(ids[None], use_cache=False)
        assert sorted(seen) == [0, 1]
        for layer, (*tensors, scale) in seen.items():
            mine = captured[layer][number]
            assert (mine.layer, mine.prompt, mine.scale) == (layer, number, scale)
            torch.testing.assert_close([mine.q, mine.k, mine.v], tensors, rtol=1e-4, atol=1e-5)


def test_one_layer_is_on_the_device_at_a_time_and_any_gives_the_same_inputs_after_any_other(folder):
    """And the model is left as it was."""
    loaded = stream(folder, False)
    decoder = loaded.model.get_decoder()
    whole = []
    for index, captured in enumerate(layers.capture_layers(loaded, PROMPTS)):
        whole.append([next(captured)])  # the second prompt moves before the next layer
        on_meta = [all(parameter.is_meta for parameter in layer.parameters()) for layer in decoder.layers]
        assert on_meta == [number != index for number in range(2)]
        assert decoder.embed_tokens.weight.is_meta
        whole[-1] += captured
    assert all(parameter.is_meta for parameter in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "sdpa"
    assert not any("forward" in module.__dict__ for module in loaded.model.modules())
    with layers.with_attention(loaded.model, layers.NAME):
        forward = layers.DenseForward(loaded, PROMPTS)
        # on from there; again; back; all of a layer after one prompt of the layer before it
        for row, first, count in ((0, 0, 2), (1, 1, 2), (1, 0, 4), (0, 0, 1), (1, 1, 2)):
            expected = [captured for of_layer in whole[first : row + 1] for captured in of_layer]
            for mine, theirs in zip(islice(forward.inputs_up_to(row), count), expected[:count], strict=True):
                assert (mine.layer, mine.prompt) == (theirs.layer, theirs.prompt)
                assert torch.equal(mine.q, theirs.q)
        assert [captured.layer for captured in forward.inputs(1)] == [1, 1]


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ("model.layers.1.self_attn.k_proj.weight", "layer 1, prompt 0: the tensor of keys holds inf or NaN"),
        ("model.layers.0.mlp.up_proj.weight", "layer 0, prompt 0: the hidden state holds inf or NaN"),
    ],
)
def test_nan_is_named_by_layer_and_prompt(tmp_path, parameter, message):
    folder = save("llama", tmp_path, lambda model: model.get_parameter(parameter).data[3, 5].fill_(torch.nan))
    with pytest.raises(ModelError, match=message):
        for _ in layers.capture_layers(stream(folder, False), PROMPTS):
            pass


def test_scale_caps_and_sinks_reach_what_replaces_attention_and_what_was_captured():
    q, k, v = (torch.randn(1, heads, 40, 16) for heads in (4, 2, 2))
    scoring, module = Scoring(0.3, 1.5, torch.linspace(-1, 4, 4)), torch.nn.Module()
    expected = naive_attention(q, k, v, **scoring.arguments())

    def attend(*call):
        assert call == (q, k, v, scoring)
        return layers.Captured(q, k, v, *call[3][:1], softcap=call[3].softcap, sinks=call[3].sinks).truth()

    with layers.override_attention(module, attend):
        out, _ = layers._compute_attention(module, q, k, v, None, scaling=0.3, softcap=1.5, s_aux=scoring.sinks)
    captured = layers.Captured(q, k, v, **scoring.arguments())
    for ours in (out.transpose(1, 2), captured.dense(), captured.s2o(LayerConfig.uniform(4, tau=0.0))()):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)
