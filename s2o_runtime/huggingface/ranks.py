"""Which query heads of a layer this process holds, where transformers splits a model over processes (`tp_plan`)."""

from __future__ import annotations

from torch import nn

from s2o_runtime.serving.fit import Rank


def heads_here(attention: nn.Module, query_heads: int) -> range | None:
    """The query heads that an attention module computes in this process; None if all of them.

    Torch cuts the rows of the projections into equal parts, in the order of the ranks, so a rank holds neighbouring
    heads. A module whose parameters are whole computes all heads.

    Args:
        attention: the module; its split parameters are torch's DTensors.
        query_heads: of the whole model.

    Raises:
        ProfileError: the ranks cannot share so many heads.
    """
    for parameter in attention.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        for dimension, placement in enumerate(getattr(parameter, "placements", ())):
            if mesh is None or not placement.is_shard() or mesh.size(dimension) == 1:
                continue
            return Rank(mesh.get_local_rank(dimension), mesh.size(dimension)).heads(query_heads)
    return None
