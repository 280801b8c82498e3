"""The interface of vLLM that S2O's backend was written for.

The recorded interfaces in tests/vllm_interfaces are of the versions that were read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..serving.sources import ServerInterface, find_classes, list_parameters, read_fields

BACKEND = Path("v1/attention/backend.py")
FLASH = Path("v1/attention/backends/flash_attn.py")
READ = ("0.23", "0.29", "0.32", "0.33")  # versions whose sources were read; 0.32 and 0.33 were run, on a CPU
FORWARD = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")  # of an implementation, first ones
FORWARD_MORE = {"output_scale", "output_block_scale"}  # and those after them that are known
BUILD = ("common_prefix_len", "common_attn_metadata", "fast_build")
INIT = (
    "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype",
    "logits_soft_cap", "attn_type",
)  # fmt: skip
COMMON = {
    "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len",
    "max_seq_len", "block_table_tensor", "slot_mapping", "causal",
}  # fmt: skip
# fields of CommonAttentionMetadata that may be there as well, and how a part of a batch gets them: `batch.slice_batch`
COMMON_MORE = {
    "logits_indices_padded", "num_logits_indices", "max_logits_per_req", "encoder_seq_lens", "encoder_seq_lens_cpu",
    "dcp_local_seq_lens", "dcp_local_seq_lens_cpu", "dcp_local_seq_lens_cpu_upper_bound", "positions",
    "is_prefilling", "seq_lens_cpu_upper_bound", "req_idx", "mm_req_doc_ranges", "rswa_prefix_lens",
    "replayssm_decode_base_cpu", "_seq_lens_cpu", "_num_computed_tokens_cpu", "_num_computed_tokens_cache",
    "_token_to_req_indices_cache",
}  # fmt: skip


@dataclass(frozen=True)
class VllmInterface(ServerInterface):
    """The names in vLLM on which the backend relies; parameters are without self."""

    forward: tuple[str, ...]  # parameters of the stock implementation's `forward`
    init: tuple[str, ...]  # and of its `__init__`
    build: tuple[str, ...]  # of the stock builder's `build`
    common: tuple[str, ...]  # fields of CommonAttentionMetadata
    cache_update: bool  # the stock backend's `forward_includes_kv_cache_update`

    @classmethod
    def from_sources(cls, folder: Path) -> VllmInterface:
        """Read the interface of FlashAttention's backend, from the folder of the package `vllm`."""
        stock, implementation, builder = find_classes(
            folder / FLASH, "FlashAttentionBackend", "FlashAttentionImpl", "FlashAttentionMetadataBuilder"
        )
        (common,) = find_classes(folder / BACKEND, "CommonAttentionMetadata")
        return cls(
            list_parameters(implementation, "forward"),
            list_parameters(implementation, "__init__"),
            list_parameters(builder, "build"),
            tuple(read_fields(common)),
            read_fields(stock).get("forward_includes_kv_cache_update") is not False,
        )

    def find_obstacle(self) -> str | None:
        if self.forward[: len(FORWARD)] != FORWARD or set(self.forward[len(FORWARD) :]) - FORWARD_MORE:
            return f"forward takes {', '.join(self.forward)}"
        if self.init[: len(INIT)] != INIT:
            return f"an implementation is made with {', '.join(self.init)}"
        if self.build != BUILD:
            return f"build takes {', '.join(self.build)}"
        if missing := COMMON - set(self.common):
            return f"CommonAttentionMetadata has no {', '.join(sorted(missing))}"
        if unknown := set(self.common) - COMMON - COMMON_MORE:
            return f"CommonAttentionMetadata has {', '.join(sorted(unknown))}, which S2O does not know"
        return "forward writes the KV cache" if self.cache_update else None
