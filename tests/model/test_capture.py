"""What the calibrator captures layer by layer is what a normal forward pass hands to attention."""

import pytest
import torch

from calibrate.model import layers
from s2o_runtime import patch
from s2o_runtime.config import LayerConfig
from s2o_runtime.errors import ModelError
from s2o_runtime.huggingface.hf import layer_states
from s2o_runtime.reference.dense import dense_attention
from s2o_runtime.scoring import Scoring
from support.marks import all_but_first
from support.models import ARCHITECTURES, make_profile, save, stream
from support.naive import naive_attention

SLOW = pytest.mark.slow(reason="further architectures")
PROMPTS = [torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(length)) for length in (150, 60)]


@pytest.fixture(params=all_but_first(ARCHITECTURES, SLOW), scope="module")
def folder(request, tmp_path_factory):
    return save(request.param, tmp_path_factory.mktemp(request.param))


def seen_by_attention(model, ids):
    """Layer -> q, k, v and scale of a whole forward pass."""
    seen = {}
    for state in layer_states(model):
        state.observer = lambda layer, q, k, v, scoring, out: seen.update({layer: (q, k, v, scoring.scale)})
    with torch.no_grad():
        model(ids[None], use_cache=False)
    return seen


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "streamed"])
def test_layers_see_what_the_whole_model_sees(folder, resident):
    captured = [list(of_layer) for of_layer in layers.layers(stream(folder, resident), PROMPTS)]
    model = stream(folder, True).model
    patch(model, make_profile(model, 0.0, min_length=10))
    for number, ids in enumerate(PROMPTS):
        seen = seen_by_attention(model, ids)
        assert sorted(seen) == [0, 1]
        for layer, (q, k, v, scale) in seen.items():
            one = captured[layer][number]
            assert (one.layer, one.prompt, one.scale) == (layer, number, scale)
            for mine, theirs in ((one.q, q), (one.k, k), (one.v, v)):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_one_layer_is_on_the_device_at_a_time_and_the_model_is_left_as_it_was(folder):
    loaded = stream(folder, False)
    decoder = loaded.model.get_decoder()
    for index, captured in enumerate(layers.layers(loaded, PROMPTS)):
        next(captured)
        on_meta = [all(each.is_meta for each in layer.parameters()) for layer in decoder.layers]
        assert on_meta == [place != index for place in range(2)]
        assert decoder.embed_tokens.weight.is_meta
    assert all(each.is_meta for each in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "sdpa"
    assert not any("forward" in module.__dict__ for module in loaded.model.modules())


def test_the_layers_on_the_way_are_those_that_are_asked_for_one_by_one(folder):
    loaded = stream(folder, False)
    whole = [list(captured) for captured in layers.layers(loaded, PROMPTS)]
    layers.register()
    with layers.attention_implementation(loaded.model, layers.NAME):
        forward = layers.DenseForward(loaded, PROMPTS)
        for up_to, begin in ((0, 0), (1, 1), (1, 0), (0, 0)):  # on from there; again; back
            came_by = list(forward.inputs_up_to(up_to))
            expected = [captured for of_layer in whole[begin : up_to + 1] for captured in of_layer]
            assert [(one.layer, one.prompt) for one in came_by] == [(one.layer, one.prompt) for one in expected]
            assert all(torch.equal(mine.q, theirs.q) for mine, theirs in zip(came_by, expected, strict=True))


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
        for _ in layers.layers(stream(folder, False), PROMPTS):
            pass


def test_sinks_and_caps_are_captured():
    """What the layer passes to attention is kept with q, k and v, and is part of the dense attention that runs."""
    q, k, v = (torch.randn(1, heads, 40, 16) for heads in (4, 2, 2))
    sinks, module, kept = torch.linspace(-1, 4, 4), torch.nn.Module(), []

    def keep(q, k, v, scoring):
        kept.append((q, k, v, scoring))
        return dense_attention(q, k, v, **scoring.arguments())

    with layers.override_attention(module, keep):
        out, _ = layers._compute_attention(module, q, k, v, None, scaling=0.3, softcap=1.5, s_aux=sinks)
    assert all(ours is theirs for ours, theirs in zip(kept[0], (q, k, v), strict=False))
    assert kept[0][3] == Scoring(0.3, 1.5, sinks)
    expected = naive_attention(q, k, v, scale=0.3, softcap=1.5, sinks=sinks)
    torch.testing.assert_close(out.transpose(1, 2).double(), expected, rtol=1e-4, atol=1e-5)


def test_what_was_captured_is_computed_dense_and_by_s2o_with_the_layers_scores():
    q, k, v = (torch.randn(1, heads, 40, 16) for heads in (4, 2, 2))
    scoring = Scoring(0.3, 1.5, torch.linspace(-1, 4, 4))
    captured = layers.Captured(q, k, v, **scoring.arguments())
    expected = naive_attention(q, k, v, **scoring.arguments())
    for out in (captured.dense(), captured.s2o(LayerConfig.uniform(4, tau=0.0))()):
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
