"""A small model of many architectures, and which of its layers run S2O.

An architecture needs no entry here to be supported; those of the table in docs/results/architectures.md have one.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from transformers import CONFIG_MAPPING, DynamicCache, PreTrainedConfig

from support.models import RUNS
from support.models import SIZES as TINY

# Before it got this attribute, hybrid models wanted caches of their own classes, and a mask of windows with a static
# cache did not say that nothing else deviates from a causal one, so that such a layer runs dense
OLD = "" if hasattr(DynamicCache, "has_previous_state") else "old"

# small values would make all scores alike: masks, windows and caps must matter
SIZES = TINY | {"head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.2}
WINDOW, CAP = 48, 2.0

SLIDING = f"the layer sees a sliding window of {WINDOW} keys"
CHUNKED = f"the layer sees chunks of {WINDOW} keys"
LINEAR, CONVOLUTION = "linear", "convolution"  # layers without softmax attention, of which `explain` has no rows
SILENT = (LINEAR, CONVOLUTION)
ALL_RUN = (RUNS, RUNS)
KINDS = {SLIDING: "sliding_attention", CHUNKED: "chunked_attention", LINEAR: "linear_attention", CONVOLUTION: "conv"}


@dataclass(frozen=True)
class Case:
    """A model: its type, what its configuration has beside `SIZES` or instead, for each layer why it runs S2O or never
    does, if it reads images too (then `sizes` are of its text part), and what this transformers cannot do with it."""

    architecture: str
    sizes: dict[str, Any] = field(default_factory=dict)
    reasons: tuple[str, str] = ALL_RUN
    vision: bool = False
    broken: str = ""

    @property
    def config(self) -> PreTrainedConfig:
        sizes = {name: value for name, value in (SIZES | self.sizes).items() if value is not ...}
        make = CONFIG_MAPPING[self.architecture]
        return make(text_config=sizes, vision_config=VISION) if self.vision else make(**sizes)

    @property
    def runs(self) -> bool:
        return RUNS in self.reasons

    @property
    def runs_all(self) -> bool:
        return self.reasons == ALL_RUN

    @property
    def others(self) -> str:
        """Return how many layers of other kinds there are, as `explain` says it."""
        counts = Counter(KINDS[reason] for reason in self.reasons if reason in KINDS)
        return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2}
VISION |= {"num_heads": 2, "out_hidden_size": 64, "image_size": 28, "patch_size": 14}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 4}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA = _SLIDING | {"query_pre_attn_scalar": 32}
_QWEN_WINDOW = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW}
_DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "layer_types": ["linear_attention", "full_attention"]}
_DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 32}
_ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2}
_ROUTED |= {"moe_intermediate_size": 32}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
_LATENT |= _ROUTED | {"num_key_value_heads": 4, "head_dim": ...}
_CHUNKS = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": WINDOW}
_CHUNKS |= {"num_local_experts": 4, "intermediate_size_mlp": 64, "no_rope_layers": [1, 0]}
_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
_WIDE = {"hidden_size": 128, "initializer_range": 0.1, "head_dim": ...}  # its heads divide the hidden size
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}

CASES = {
    "llama": Case("llama"),
    "llama4": Case("llama4_text", _CHUNKS, (CHUNKED, RUNS), broken="generate with a static cache"),
    "qwen2": Case("qwen2"),
    "qwen2-sliding": Case("qwen2", _QWEN_WINDOW, (RUNS, SLIDING)),
    "qwen2-moe": Case("qwen2_moe", _SHARED),
    "qwen2.5-vl": Case("qwen2_5_vl", _SECTIONS | _WIDE, vision=True),
    "qwen3": Case("qwen3"),
    "qwen3-sliding": Case("qwen3", _QWEN_WINDOW, (RUNS, SLIDING)),
    "qwen3-moe": Case("qwen3_moe", _EXPERTS),
    "qwen3-next": Case("qwen3_next", _SHARED | _DELTA, (LINEAR, RUNS), broken=OLD and "a cache"),
    "qwen3-vl": Case("qwen3_vl", _SECTIONS, vision=True),
    "mistral": Case("mistral", {"sliding_window": None}),
    "mistral3": Case("mistral3", {"model_type": "mistral", "sliding_window": None}, vision=True),
    "ministral": Case("ministral", _SLIDING, (SLIDING, RUNS)),
    "mixtral": Case("mixtral", {"num_local_experts": 4}),
    "phi3": Case("phi3"),
    "phi3-long-window": Case("phi3", {"sliding_window": 1024}, broken=OLD and "a static cache"),
    "gemma": Case("gemma"),
    "gemma2": Case("gemma2", _GEMMA | {"attn_logit_softcapping": CAP}, (SLIDING, RUNS)),
    "gemma2-uncapped": Case("gemma2", _GEMMA | {"attn_logit_softcapping": None}, (SLIDING, RUNS)),
    "gemma3": Case("gemma3_text", _GEMMA, (SLIDING, RUNS)),
    "gemma3-vision": Case("gemma3", _GEMMA, (SLIDING, RUNS), vision=True),
    "gpt-oss": Case("gpt_oss", _SLIDING | _PLAIN_ROPE | {"num_local_experts": 4}, (SLIDING, RUNS)),
    "olmo2": Case("olmo2"),
    "olmo3": Case("olmo3", _SLIDING, (SLIDING, RUNS)),
    "granite": Case("granite", {"logits_scaling": 4.0, "attention_multiplier": 32**-0.5}),
    "glm4": Case("glm4"),
    "smollm3": Case("smollm3"),
    "cohere": Case("cohere", {"logit_scale": 0.25}),
    "cohere2": Case("cohere2", _SLIDING, (SLIDING, RUNS)),
    "exaone4": Case("exaone4", _SLIDING, (SLIDING, RUNS)),
    "seed-oss": Case("seed_oss"),
    "starcoder2": Case("starcoder2", {"sliding_window": None}),
    "deepseek-v3": Case("deepseek_v3", _LATENT, (RUNS, RUNS)),
    "glm4-moe": Case("glm4_moe", _ROUTED),
    "lfm2": Case("lfm2", {"layer_types": ["conv", "full_attention"]}, (CONVOLUTION, RUNS), broken=OLD and "a cache"),
}
RUNNING = [name for name, case in CASES.items() if case.runs]
WINDOWED = [name for name, case in CASES.items() if SLIDING in case.reasons]
COMPILED = ("llama", "qwen2", "qwen3", "qwen3-moe", "mistral", "mixtral", "phi3", "gemma2", "gemma3")
