"""The kind of attention of each decoder layer of a model, by its transformers configuration alone.

S2O serves layers of full causal attention. Layers of other kinds (sliding, chunked, linear, recurrent, cross-attention)
stay what they are.
"""

from __future__ import annotations

from typing import Any

from .errors import ModelError

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
CROSS = "cross_attention"
UNLIMITED = 1 << 40  # tokens
_FORMER = {"attention": FULL, "hybrid": FULL}  # a hybrid layer has full attention beside a recurrent part


def get_text_config(config: Any) -> Any:
    """Return the configuration of a model's text part; the configuration itself if it has one part only."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def list_layer_kinds(config: Any) -> tuple[str, ...]:
    """Return the kind of each decoder layer, by the names that transformers gives them ("full_attention", ...).

    A window or chunk that is at least as long as the positions that the model knows hides no key: such a layer is one
    of full attention. Raises ModelError if the configuration is of no decoder, or does not say how many layers it has.
    """
    config = get_text_config(config)
    name = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"a model of type {name!r} is an encoder with a decoder, expected a decoder alone: use another"
        )
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int) or layers < 1:
        raise ModelError(f"the configuration of type {name!r} does not say num_hidden_layers: it is of no decoder")
    listed = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if listed:
        local = getattr(config, "attention_window_size", None) is not None  # recurrent models with windows
        kinds = [SLIDING if local and kind == "attention" else _FORMER.get(kind, kind) for kind in listed]
    else:
        kinds = [SLIDING if get_window(config) else CHUNKED if get_chunk(config) else FULL] * layers
    for layer in getattr(config, "cross_attention_layers", None) or ():
        kinds[layer] = CROSS
    hidden_by = {SLIDING: get_window(config), CHUNKED: get_chunk(config)}
    return tuple(
        FULL if kind in hidden_by and (hidden_by[kind] or UNLIMITED) >= get_max_positions(config) else kind
        for kind in kinds
    )


def get_max_positions(config: Any) -> int:
    """Return the longest prompt that a model is made for, in tokens; `UNLIMITED` if its configuration names none."""
    return int(getattr(get_text_config(config), "max_position_embeddings", None) or UNLIMITED)


def count_visible_keys(kind: str, config: Any) -> int | None:
    """Return the most keys that a query of such a layer sees; None if all before it, 0 without softmax attention."""
    if kind == FULL:
        return None
    return {SLIDING: get_window(config), CHUNKED: get_chunk(config)}.get(kind) or 0


def describe_kind(kind: str, config: Any) -> str:
    """Return what layers of a kind other than full attention are, as a reason for leaving them as they are."""
    if kind == SLIDING:
        return describe_window(get_window(config))
    if kind == CHUNKED:
        return f"the layer sees chunks of {get_chunk(config)} keys"
    return f"the layer is one of {kind}"


def describe_window(keys: int | None) -> str:
    """Return the reason that a layer whose queries see only `keys` keys does not run S2O."""
    return f"the layer sees a sliding window of {keys} keys"


def get_window(config: Any) -> int | None:
    """Return the keys that a layer of sliding attention sees; None if the configuration names no window."""
    config = get_text_config(config)
    size = getattr(config, "sliding_window", None) or getattr(config, "attention_window_size", None)
    return int(size) if size else None


def get_chunk(config: Any) -> int | None:
    """Return the size of the chunks of a layer of chunked attention; None if the configuration names none."""
    size = getattr(get_text_config(config), "attention_chunk_size", None)
    return int(size) if size else None
