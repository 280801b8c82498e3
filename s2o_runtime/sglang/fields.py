"""Names of SGLang's modes, and of the fields of its ForwardBatch, that S2O knows; without torch, for s2o-doctor."""

from __future__ import annotations

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
