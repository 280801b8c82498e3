"""Call the attention op alone on random q, k, v, and print its density, error and backend.

    python examples/attention_op.py [TOKENS]

On a GPU the call runs the Triton kernels, on a CPU the reference in plain torch. The more a query's attention is
concentrated on few keys, the earlier S2O stops: density is the share of the causal query-key pairs it computed.
"""

from __future__ import annotations

import sys

import torch

from s2o_runtime import LayerConfig, s2o_attention
from s2o_runtime.reference.dense import dense_attention

QUERY_HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64


def main(tokens: int) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, heads, tokens, HEAD_DIM) for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS))
    q[..., 0], k[..., 0] = HEAD_DIM**0.5, 3 * k[..., 0]  # queries agree on a few heavy keys
    q, k, v = (t.to(device, dtype) for t in (q, k, v))
    dense = dense_attention(q, k, v).float()
    for tau in (0.0, 0.1, 1.0, 10.0):
        config = LayerConfig.uniform(QUERY_HEADS, tau=tau, segment=256, tail="mean")
        out, _, stats = s2o_attention(q, k, v, config, return_stats=True)
        assert stats is not None  # they were asked for
        error = (out.float() - dense).square().mean() / dense.square().mean()
        print(f"tau {tau:4g}: density {float(stats.density.mean()):.3f}, rel_mse {float(error):.1e}", end="")
        print(f", backend {stats.backend} ({stats.reason})")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2048)
