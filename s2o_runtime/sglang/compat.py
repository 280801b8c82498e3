"""The interface of SGLang that S2O's backend was written for.

Above all its FlashAttention backend must read nothing of a batch that a part of a batch would not have.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from ..serving.sources import ServerInterface, find_classes, find_method, list_parameters, read_fields

READ = ("0.5.23",)  # the versions whose sources were read; its engine was run on a CPU
FLASH = Path("layers/attention/flashattention_backend.py")
BATCH = Path("model_executor/forward_batch_info.py")
POOL = Path("mem_cache/memory_pool.py")
RADIX = Path("layers/radix_attention.py")
FORWARD = ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")  # of forward_extend, first ones; more are keywords
WRITE = ("layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale")  # of the pool's set_kv_buffer, first ones
PROMPTS = ("EXTEND", "MIXED")  # modes of batches that S2O may have a part in; MIXED ones have decode rows too
# Fields of a ForwardBatch that a part of it has cut to its requests, or to their tokens.
OF_REQUESTS = (
    "req_pool_indices", "seq_lens", "seq_lens_cpu", "orig_seq_lens", "extend_seq_lens", "extend_prefix_lens",
    "extend_seq_lens_cpu", "extend_prefix_lens_cpu",
)  # fmt: skip
OF_TOKENS = ("input_ids", "out_cache_loc", "positions")
COUNTS = ("batch_size", "seq_lens_sum", "extend_num_tokens")
# What a part of a batch cannot have: such batches are the stock backend's as a whole.
WHOLE_ONLY = {
    "encoder_lens": "the layer attends to an encoder",
    "dcp_kv_mask": "the context is shared by several ranks",
    "multi_item_delimiter_indices": "several items are scored at once",
    "mha_return_lse": "log-sum-exps are asked for",
    "max_seq_len_override": "the batch is of a CUDA graph",
    "_attn_output": "the batch is of a CUDA graph",
}
# fields that are read of a batch and is the same for its parts: of other modes, of caches of other kinds, or of MLA
SHARED = {
    "forward_mode", "spec_info", "spec_algorithm", "kv_loc_plan", "attn_attend_prefix_cache", "mha_one_shot",
    "prefix_chunk_cu_seq_lens", "prefix_chunk_idx", "prefix_chunk_max_seq_lens",
}  # fmt: skip
LAYER = {
    "layer_id", "tp_q_head_num", "tp_k_head_num", "qk_head_dim", "v_head_dim", "scaling", "logit_cap",
    "sliding_window_size", "is_cross_attention", "attn_type", "use_irope", "xai_temperature_len", "k_scale", "v_scale",
}  # fmt: skip
# and those that say what is read of a batch
READERS = {
    "capture_hidden_mode", "extend_logprob_start_lens_cpu", "return_logprob", "spec_algorithm", "token_indices_to_pool",
}  # fmt: skip
NEEDED = {*OF_REQUESTS, *OF_TOKENS, *COUNTS, "forward_mode"}


@dataclass(frozen=True)
class SglangInterface(ServerInterface):
    """The names in SGLang on which the backend relies; parameters are without self and class."""

    forward: tuple[str, ...]  # parameters of the FlashAttention backend's `forward_extend`
    reads: tuple[str, ...]  # fields of a batch that it and `init_forward_metadata` read
    batch: tuple[str, ...]  # fields of ForwardBatch
    modes: tuple[str, ...]  # members of ForwardMode
    write: tuple[str, ...]  # parameters of `MHATokenToKVPool.set_kv_buffer`
    location: tuple[str, ...]  # and of `KVWriteLoc.for_layer`
    layer: tuple[str, ...]  # attributes that RadixAttention sets

    @classmethod
    def from_sources(cls, folder: Path) -> SglangInterface:
        """Read the interface, from the folder of the package `sglang.srt`."""
        (backend,) = find_classes(folder / FLASH, "FlashAttentionBackend")
        batch, modes = find_classes(folder / BATCH, "ForwardBatch", "ForwardMode")
        kv_pool, location = find_classes(folder / POOL, "MHATokenToKVPool", "KVWriteLoc")
        (layer,) = find_classes(folder / RADIX, "RadixAttention")
        targets = [target for node in modes.body if isinstance(node, ast.Assign) for target in node.targets]
        readers = [find_method(backend, name) for name in ("init_forward_metadata", "forward_extend")]
        return cls(
            forward=list_parameters(backend, "forward_extend"),
            reads=tuple(sorted(set().union(*(_list_attributes(reader, "forward_batch") for reader in readers)))),
            batch=tuple(read_fields(batch)),
            modes=tuple(target.id for target in targets if isinstance(target, ast.Name)),
            write=list_parameters(kv_pool, "set_kv_buffer"),
            location=list_parameters(location, "for_layer"),
            layer=tuple(sorted(_list_attributes(find_method(layer, "__init__"), "self"))),
        )

    def find_obstacle(self) -> str | None:
        if self.forward[: len(FORWARD)] != FORWARD:
            return f"forward_extend takes {', '.join(self.forward)}"
        if self.write[: len(WRITE)] != WRITE:
            return f"set_kv_buffer takes {', '.join(self.write)}"
        if self.location[:2] != ("forward_batch", "layer"):
            return f"for_layer takes {', '.join(self.location)}"
        if unknown := set(self.reads) - NEEDED - SHARED - set(WHOLE_ONLY):
            return f"its FlashAttention reads {', '.join(sorted(unknown))} of a batch, which S2O does not know"
        for owner, names, needed in (
            ("ForwardBatch", self.batch, NEEDED | READERS),
            ("ForwardMode", self.modes, set(PROMPTS)),
            ("RadixAttention", self.layer, LAYER),
        ):
            if missing := needed - set(names):
                return f"{owner} has no {', '.join(sorted(missing))}"
        return None


def _list_attributes(definition: ast.FunctionDef, owner: str) -> set[str]:
    """Return the attributes of a parameter that a method names."""
    return {
        node.attr
        for node in ast.walk(definition)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner
    }
