"""Which vLLM this is, and whether its interface is one that S2O's backend was written for.

vLLM promises nothing to backends outside its tree, so what the backend relies on is looked at, not the version alone:
the recorded interfaces in tests/vllm_interfaces are of the versions that were read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

BACKEND = Path("v1/attention/backend.py")
FLASH = Path("v1/attention/backends/flash_attn.py")
READ = ("0.23", "0.29", "0.32", "0.33")  # versions whose sources were read; 0.32 was run, on its CPU engine
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
# fields of CommonAttentionMetadata that may be there as well, and how a part of a batch gets them: `batch.part_of`
COMMON_MORE = {
    "logits_indices_padded", "num_logits_indices", "max_logits_per_req", "encoder_seq_lens", "encoder_seq_lens_cpu",
    "dcp_local_seq_lens", "dcp_local_seq_lens_cpu", "dcp_local_seq_lens_cpu_upper_bound", "positions",
    "is_prefilling", "seq_lens_cpu_upper_bound", "req_idx", "mm_req_doc_ranges", "rswa_prefix_lens",
    "replayssm_decode_base_cpu", "_seq_lens_cpu", "_num_computed_tokens_cpu", "_num_computed_tokens_cache",
    "_token_to_req_indices_cache",
}  # fmt: skip


@dataclass(frozen=True)
class Interface:
    """What of vLLM the backend relies on, as names.

    Attributes:
        forward, init: the parameters of the stock implementation's `forward` and `__init__`, without self.
        build: those of the stock builder's `build`.
        common: the fields of CommonAttentionMetadata.
        cache_update: the stock backend's `forward_includes_kv_cache_update`.
    """

    forward: tuple[str, ...]
    init: tuple[str, ...]
    build: tuple[str, ...]
    common: tuple[str, ...]
    cache_update: bool

    @classmethod
    def in_sources(cls, folder: Path) -> Interface:
        """The interface of FlashAttention's backend in the sources of a vLLM.

        Nothing is imported: vLLM loads its plugins in processes that must not touch a GPU.

        Args:
            folder: of the package `vllm`.

        Raises:
            OSError: a file is not there.
            ValueError: a class or function is not there, or a file is no Python.
        """
        flash, backend = (_classes(folder / path) for path in (FLASH, BACKEND))
        try:
            stock, common = flash["FlashAttentionBackend"], backend["CommonAttentionMetadata"]
            implementation, builder = flash["FlashAttentionImpl"], flash["FlashAttentionMetadataBuilder"]
        except KeyError as error:
            raise ValueError(f"there is no class {error}") from error
        return cls(
            _parameters(implementation, "forward"),
            _parameters(implementation, "__init__"),
            _parameters(builder, "build"),
            tuple(name for name, _ in _fields(common)),
            dict(_fields(stock)).get("forward_includes_kv_cache_update") is not False,
        )

    def obstacle(self) -> str | None:
        """What of it the backend was not written for, or None."""
        if self.forward[: len(FORWARD)] != FORWARD or set(self.forward[len(FORWARD) :]) - FORWARD_MORE:
            return f"forward takes {_listed(self.forward)}"
        if self.init[: len(INIT)] != INIT:
            return f"an implementation is made with {_listed(self.init)}"
        if self.build != BUILD:
            return f"build takes {_listed(self.build)}"
        if missing := COMMON - set(self.common):
            return f"CommonAttentionMetadata has no {_listed(sorted(missing))}"
        if unknown := set(self.common) - COMMON - COMMON_MORE:
            return f"CommonAttentionMetadata has {_listed(sorted(unknown))}, which S2O does not know"
        if self.cache_update:
            return "forward writes the KV cache"
        return None


def interface_obstacle(folder: Path) -> str | None:
    """What of a vLLM's interface the backend was not written for; None if it was.

    Args:
        folder: of the package `vllm`.
    """
    try:
        return Interface.in_sources(folder).obstacle()
    except (OSError, ValueError, SyntaxError) as error:
        return f"its sources are not as expected: {error}"


def _classes(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _fields(owner: ast.ClassDef) -> list[tuple[str, object]]:
    """The annotated names of a class, with their values where these are constants."""
    return [
        (node.target.id, node.value.value if isinstance(node.value, ast.Constant) else None)
        for node in owner.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def _parameters(owner: ast.ClassDef, function: str) -> tuple[str, ...]:
    """The parameters of a method, without self."""
    definitions = [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == function]
    if not definitions:
        raise ValueError(f"{owner.name} has no {function}")
    arguments = definitions[0].args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return tuple(name for name in names if name != "self")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
