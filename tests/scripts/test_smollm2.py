"""The script that makes SmolLM2's checkpoint: what it keeps of a model, and how the context grows."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.smollm2 import plain_llama


def small_llama():
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    config.quantization_config = {"quant_method": "gguf"}
    return LlamaForCausalLM(config).to(torch.bfloat16)


def test_the_weights_stay_and_where_they_came_from_goes():
    model = small_llama()
    plain = plain_llama(model, 8192)
    assert plain.config.to_dict().get("quantization_config") is None
    assert plain.config.max_position_embeddings == 8192
    assert plain.config.rope_parameters["rope_type"] == "default"
    ids = torch.arange(16)[None]
    torch.testing.assert_close(plain(ids).logits, model(ids).logits)


def test_a_longer_context_is_yarn():
    plain = plain_llama(small_llama(), 32768)
    assert plain.config.max_position_embeddings == 32768
    rope = plain.config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 8192)
