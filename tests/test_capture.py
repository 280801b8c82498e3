import torch
from test_hf import CONFIGS, make_profile
from transformers import AutoModelForCausalLM

from calibrate import capture
from s2o_runtime import patch
from s2o_runtime.hf import layer_states


def test_layers_see_what_the_whole_model_sees():
    """The same q, k, v that a normal forward pass hands to attention, layer for layer."""
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"], attn_implementation="sdpa").eval()
    prompts = [torch.randint(3, 128, (length,)) for length in (150, 60)]
    captured = list(capture.layers(model, prompts))
    assert model.config._attn_implementation == "sdpa"

    patch(model, make_profile(model, 0.0, min_length=10))
    for number, ids in enumerate(prompts):
        seen = {}
        for state in layer_states(model):
            state.observer = lambda layer, q, k, v, scale, out, seen=seen: seen.update({layer: (q, k, v, scale)})
        with torch.no_grad():
            model(ids[None], use_cache=False)
        assert sorted(seen) == [0, 1]
        for layer, (q, k, v, scale) in seen.items():
            one = captured[layer][number]
            for mine, theirs in ((one.q, q), (one.k, k), (one.v, v)):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
            assert one.scale == scale
