"""A small model of every supported architecture, and which of its layers run S2O."""

from dataclasses import dataclass
from typing import Any

from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from support.models import SIZES as TINY

# small values would make all scores alike: masks, windows and caps must matter
SIZES = TINY | {"head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.2}
WINDOW, CAP = 48, 2.0

RUNS = "the tensors are on the cpu, the kernel needs a GPU"  # which is why the reference runs, not the kernel
SLIDING = f"the layer sees a sliding window of {WINDOW} keys"
ALL_RUN = (RUNS, RUNS)


@dataclass(frozen=True)
class Case:
    """A model, and for each of its layers why it runs S2O or why it never does."""

    config: PreTrainedConfig
    reasons: tuple[str, str] = ALL_RUN

    @property
    def runs(self) -> bool:
        return RUNS in self.reasons


def _windowed(kind: type[PreTrainedConfig], **more: Any) -> PreTrainedConfig:
    return kind(**SIZES, sliding_window=WINDOW, **more)


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 4}
_ONE_OF_EACH = {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 32}
_QWEN_WINDOW = {"use_sliding_window": True, "max_window_layers": 1}

CASES = {
    "llama": Case(LlamaConfig(**SIZES)),
    "qwen2": Case(Qwen2Config(**SIZES)),
    "qwen2-sliding": Case(_windowed(Qwen2Config, **_QWEN_WINDOW), (RUNS, SLIDING)),
    "qwen3": Case(Qwen3Config(**SIZES)),
    "qwen3-sliding": Case(_windowed(Qwen3Config, **_QWEN_WINDOW), (RUNS, SLIDING)),
    "qwen3-moe": Case(Qwen3MoeConfig(**SIZES, **_EXPERTS)),
    "mistral": Case(MistralConfig(**SIZES, sliding_window=None)),
    "mixtral": Case(MixtralConfig(**SIZES, num_local_experts=4)),
    "phi3": Case(Phi3Config(**SIZES)),
    "phi3-long-window": Case(Phi3Config(**SIZES, sliding_window=1024)),
    "gemma2": Case(_windowed(Gemma2Config, **_ONE_OF_EACH, attn_logit_softcapping=CAP), (SLIDING, RUNS)),
    "gemma2-uncapped": Case(_windowed(Gemma2Config, **_ONE_OF_EACH, attn_logit_softcapping=None), (SLIDING, RUNS)),
    "gemma3": Case(_windowed(Gemma3TextConfig, **_ONE_OF_EACH), (SLIDING, RUNS)),
}
RUNNING = [name for name, case in CASES.items() if case.runs]
RESTRICTED = [name for name, case in CASES.items() if case.reasons != ALL_RUN]
