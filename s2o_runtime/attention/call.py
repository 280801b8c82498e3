"""One call of the op, checked, as every backend takes it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from s2o_runtime.config import LayerConfig
from s2o_runtime.pages import PageTable
from s2o_runtime.scoring import Scoring
from s2o_runtime.shapes import CallShape, call_shape, check_heads, packed_shape

DEFAULT = Scoring()


@dataclass(frozen=True)
class AttentionCall:
    """The tensors and settings of one call; `of` and `packed` make one.

    Attributes:
        q, k, v: [B, Hq, Lq, D], [B, Hkv, Lk, D] and [B, Hkv, Lk, Dv]. Packed sequences lie one behind another along
            the length of a single batch entry.
        shape: the sizes; for packed sequences batch, q_len and kv_len are their number and maxima.
        scoring: the factor of the scores, which is filled in, their cap and the sinks.
        kv_start: integers [B], the first key of each sequence that counts; None for 0.
        cu_q, cu_k: int32 [N + 1], where packed sequences begin; None for a batch.
        with_lse: whether the log-sum-exps are to be computed.
        pages: where the keys of packed sequences are among k and v, which then are all rows of a cache; None where k
            and v are the sequences' own. Only the kernels take such calls.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    config: LayerConfig
    shape: CallShape
    scoring: Scoring
    kv_start: Tensor | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    with_lse: bool = False
    pages: PageTable | None = None

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        config: LayerConfig,
        *,
        scoring: Scoring = DEFAULT,
        kv_start: Tensor | None = None,
        with_lse: bool = False,
    ) -> AttentionCall:
        """A call of `s2o_attention`. Raises InputError and ConfigError as the op does."""
        shape = call_shape(q, k, v, kv_start)
        check_heads(config.validate(), shape)
        scoring = scoring.checked(shape, q)
        return cls(q, k, v, config, shape, scoring, kv_start, with_lse=with_lse)

    @classmethod
    def packed(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        config: LayerConfig,
        *,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        scoring: Scoring = DEFAULT,
        with_lse: bool = False,
    ) -> AttentionCall:
        """A call of `s2o_attention_varlen`. Raises InputError and ConfigError as the op does."""
        shape = packed_shape(q, k, v, cu_q=cu_q, cu_k=cu_k, max_q=max_q, max_k=max_k)
        check_heads(config.validate(), shape)
        scoring = scoring.checked(shape, q)
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        return cls(q, k, v, config, shape, scoring, None, cu_q, cu_k, with_lse)

    @property
    def is_packed(self) -> bool:
        """Whether the sequences are packed."""
        return self.cu_q is not None

    def sequence(self, rows: range, keys: range) -> AttentionCall:
        """One of the packed sequences as a call of its own, from its rows and keys."""
        q = self.q[:, :, rows.start : rows.stop]
        k, v = (tensor[:, :, keys.start : keys.stop] for tensor in (self.k, self.v))
        shape = replace(self.shape, batch=1, q_len=len(rows), kv_len=len(keys))
        return replace(self, q=q, k=k, v=v, shape=shape, cu_q=None, cu_k=None)
