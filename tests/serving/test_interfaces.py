"""Which servers are known, by what their sources say; none of them is here."""

import re
import sys
from dataclasses import replace
from types import ModuleType

import pytest

from s2o_runtime.serving.sources import find_interface_obstacle
from s2o_runtime.sglang import compat as sglang
from s2o_runtime.sglang import plugin as sglang_plugin
from s2o_runtime.vllm import compat as vllm
from s2o_runtime.vllm import plugin as vllm_plugin
from support.interfaces import recorded

VLLM, SGLANG = recorded("vllm"), recorded("sglang")
RECORDED = [*VLLM.values(), *SGLANG.values()]
NAMES = [*(f"vllm-{version}" for version in VLLM), *(f"sglang-{version}" for version in SGLANG)]


def test_the_versions_that_were_read_are_recorded():
    assert {version.rpartition(".")[0] for version in VLLM} == set(vllm.READ)
    assert set(SGLANG) == set(sglang.READ)


@pytest.mark.parametrize("interface", RECORDED, ids=NAMES)
def test_recorded_interfaces_are_known(interface):
    assert interface.find_obstacle() is None


CHANGES = {
    vllm.VllmInterface: [
        (lambda known: {"forward": (*known.forward, "mask")}, "forward takes layer, query, .*mask"),
        (lambda known: {"forward": known.forward[1:]}, "forward takes query, key"),
        (lambda known: {"init": known.init[::-1]}, "an implementation is made with sinks"),
        (lambda known: {"build": known.build[:2]}, "build takes common_prefix_len, common_attn_metadata"),
        (
            lambda known: {"common": (*known.common, "tree")},
            "CommonAttentionMetadata has tree, which S2O does not know",
        ),
        (lambda known: {"common": known.common[1:]}, "CommonAttentionMetadata has no query_start_loc"),
        (lambda known: {"cache_update": True}, "forward writes the KV cache"),
    ],
    sglang.SglangInterface: [
        (lambda known: {"forward": known.forward[1:]}, "forward_extend takes k, v"),
        (lambda known: {"write": known.write[::-1]}, "set_kv_buffer takes "),
        (lambda known: {"location": ("layer",)}, "for_layer takes layer"),
        (
            lambda known: {"reads": (*known.reads, "tree")},
            "its FlashAttention reads tree of a batch, which S2O does not know",
        ),
        (lambda known: {"batch": known.batch[1:]}, "ForwardBatch has no forward_mode"),
        (lambda known: {"modes": ("DECODE",)}, "ForwardMode has no EXTEND, MIXED"),
        (lambda known: {"layer": known.layer[1:]}, "RadixAttention has no attn_type"),
    ],
}


@pytest.mark.parametrize("known", RECORDED, ids=NAMES)
def test_what_changed_is_named(known):
    for change, obstacle in CHANGES[type(known)]:
        said = replace(known, **change(known)).find_obstacle()
        assert said is not None
        assert re.match(obstacle, said)


@pytest.mark.parametrize(
    ("plugin", "name", "module", "said"),
    [
        (vllm_plugin, "vllm", ModuleType("vllm"), "this vLLM has no registry of backends"),
        (sglang_plugin, "sglang", None, "this SGLang has no known registry of backends"),
    ],
    ids=["vllm", "sglang"],
)
def test_a_server_without_a_registry_of_backends_is_one_warning(plugin, name, module, said, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, name, module)
    plugin.register.cache_clear()
    plugin.register()
    plugin.register.cache_clear()
    (record,) = caplog.records
    assert said in record.message


VLLM_SOURCES = {
    vllm.FLASH: """
class FlashAttentionBackend(AttentionBackend):
    head_size_v: int | None = None
    forward_includes_kv_cache_update: bool = False

class FlashAttentionMetadataBuilder:
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

class FlashAttentionImpl:
    def __init__(self, num_heads, head_size, *, sinks=None): ...
    def forward(self, layer, query): ...
""",
    vllm.BACKEND: """
@dataclass
class CommonAttentionMetadata:
    num_reqs: int
    causal: bool = True
    max_query_len = 1
""",
}
SGLANG_SOURCES = {
    sglang.FLASH: """
class FlashAttentionBackend:
    def init_forward_metadata(self, forward_batch):
        self.forward_metadata = forward_batch.seq_lens
    def forward_extend(self, q, k, *, sinks=None, forward_batch=None):
        return forward_batch.extend_seq_lens.sum()
""",
    sglang.BATCH: """
class ForwardMode:
    EXTEND = 1
    def is_extend(self): ...

class ForwardBatch:
    batch_size: int
    seq_lens: object = None
""",
    sglang.POOL: """
class MHATokenToKVPool:
    def set_kv_buffer(self, layer, loc_info): ...

class KVWriteLoc:
    @classmethod
    def for_layer(cls, forward_batch, layer): ...
""",
    sglang.RADIX: """
class RadixAttention:
    def __init__(self, layer_id):
        self.layer_id = layer_id
""",
}
IN_VLLM = vllm.VllmInterface(
    forward=("layer", "query"),
    init=("num_heads", "head_size", "sinks"),
    build=("common_prefix_len", "common_attn_metadata", "fast_build"),
    common=("num_reqs", "causal"),
    cache_update=False,
)
IN_SGLANG = sglang.SglangInterface(
    forward=("q", "k", "sinks", "forward_batch"),
    reads=("extend_seq_lens", "seq_lens"),
    batch=("batch_size", "seq_lens"),
    modes=("EXTEND",),
    write=("layer", "loc_info"),
    location=("forward_batch", "layer"),
    layer=("layer_id",),
)


@pytest.mark.parametrize(
    ("flash", "sources", "expected", "obstacle", "method"),
    [
        (vllm.FLASH, VLLM_SOURCES, IN_VLLM, "forward takes layer, query", "FlashAttentionImpl has no forward"),
        (
            sglang.FLASH, SGLANG_SOURCES, IN_SGLANG, "forward_extend takes q, k, sinks, forward_batch",
            "FlashAttentionBackend has no init_forward_metadata",
        ),
    ],
    ids=["vllm", "sglang"],
)  # fmt: skip
def test_an_interface_is_read_from_sources(tmp_path, flash, sources, expected, obstacle, method):
    for path, source in sources.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source, encoding="utf-8")
    interface = type(expected)
    assert interface.from_sources(tmp_path) == expected
    assert find_interface_obstacle(interface, tmp_path) == obstacle
    classes = ("FlashAttentionBackend", "FlashAttentionImpl", "FlashAttentionMetadataBuilder")
    for source, said in (
        ("class A: ...", "there is no class 'FlashAttentionBackend'"),
        ("\n".join(f"class {name}: ..." for name in classes), method),
        ("class", "invalid syntax"),
    ):
        (tmp_path / flash).write_text(source, encoding="utf-8")
        assert f"its sources are not as expected: {said}" in find_interface_obstacle(interface, tmp_path)
    assert "its sources are not as expected" in find_interface_obstacle(interface, tmp_path / "nowhere")
