"""Profiles as a strategy, and their bytes, read and changed without the checks of the package."""

import json
from pathlib import Path

from hypothesis import strategies as st
from safetensors.torch import save

from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.identity import Geometry, join_fingerprint
from s2o_runtime.profile import METADATA_KEY, Profile

FORMAT = Path(__file__).parents[2] / "s2o_runtime" / "profile" / "FORMAT.md"


def document_of(data):
    """Return what a profile's bytes say, as JSON gives it."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(json.loads(data[8 : 8 + size])["__metadata__"][METADATA_KEY])


def file_of(document, tensors):
    """The bytes of a profile with this document, or text in its place, and these tensors, whatever they are."""
    text = document if isinstance(document, str) else json.dumps(document)
    return save(tensors, metadata={METADATA_KEY: text})


texts = st.text(max_size=8)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.integers(-2, 2**15)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)
tiles = st.builds(
    TileConfig,
    block_m=st.sampled_from([64, 128, 256]),
    block_n=st.sampled_from([32, 64, 128]),
    chunk=st.integers(1, 64),
    num_stages=st.integers(1, 6),
    specialized=st.booleans(),
    dense_below=st.integers(0, 2**31 - 1),
    min_queries=st.just(0) | st.integers(2, 2**31 - 1),
    tail_keys=st.integers(0, 2**31 - 1),
)
heads = st.builds(
    HeadConfig,
    tau=st.floats(0.0, 1e6, width=32),
    segment=st.integers(1, 128).map(lambda count: 512 * count),  # as many rows as the largest tile
    mode=st.sampled_from(["s2o", "dense"]),
    stop_rule=st.sampled_from(StopRule),
    representatives=st.sampled_from([1, 16]),
    tail=st.sampled_from(["none", "mean"]),
)


@st.composite
def profiles(draw):
    """Any profile of a few heads: every field has all values that it may have."""
    layers, kv_heads, group = (draw(st.integers(1, 2)) for _ in range(3))
    others = draw(st.dictionaries(texts, st.integers(1, 3), max_size=2))
    decoder_layers = range(layers + sum(others.values()))
    numbers = draw(st.sets(st.sampled_from(decoder_layers), min_size=layers, max_size=layers)) if others else ()
    sizes = (layers, kv_heads * group, kv_heads, draw(st.integers(1, 512)))
    geometry = Geometry(draw(texts), *sizes, tuple(sorted(numbers)), tuple(sorted(others.items())))
    lengths = sorted(draw(st.sets(st.integers(0, 20).map(lambda octave: 1 << octave), min_size=1, max_size=3)))
    config = st.builds(
        LayerConfig,
        st.tuples(*[heads] * geometry.query_heads),
        tiles,
        st.sampled_from([64, 128, 256]),
        st.sampled_from([0, 128, 256, 512]),
    )
    hashes, base = draw(st.sampled_from(["", "random-00", "a" * 64])), draw(st.sampled_from([None, "b" * 64]))
    values = draw(st.none() | st.dictionaries(texts, json_values, max_size=2))  # of the model's config.json
    capability = draw(st.tuples(st.integers(0, 999), st.integers(0, 999)))
    device = (draw(texts), draw(texts), capability, draw(st.integers(0, 1 << 16)), draw(st.integers(0, 1 << 48)))
    return Profile(
        draw(texts),
        geometry,
        join_fingerprint(hashes, base, values),
        DeviceIdentity(*device),
        tuple(lengths),
        tuple(draw(st.tuples(*[config] * layers)) for _ in lengths),
        draw(st.dictionaries(texts, json_values, max_size=3)),
    )


def leaves(value, path=()):
    """The paths of a document's fields, of objects and of what is in them."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([path] if path else []), *(leaf for name, item in inner for leaf in leaves(item, (*path, name)))]
