"""Tests of which servers are known by their sources, and what the plugins do in their processes; no server is here."""

import pickle
import re
import sys
from dataclasses import fields, replace
from enum import Enum
from inspect import signature
from types import ModuleType, SimpleNamespace

import pytest
import torch

from s2o_runtime.errors import ConfigError
from s2o_runtime.serving.sources import find_interface_obstacle
from s2o_runtime.sglang import compat as sglang
from s2o_runtime.sglang import engine as sglang_engine
from s2o_runtime.sglang import plugin as sglang_plugin
from s2o_runtime.vllm import compat as vllm
from s2o_runtime.vllm import plugin as vllm_plugin
from support import fake_sglang, fake_vllm
from support.interfaces import recorded
from support.modules import put_modules

VLLM, SGLANG = recorded("vllm"), recorded("sglang")
OFF = {"s2o": "off"}
REGISTRY, REQUEST = "vllm.v1.attention.backends.registry", "vllm.v1.request"
FLASH, STOCK = "s2o_runtime.vllm.flash.S2OBackend", "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"


def test_the_versions_that_were_read_are_recorded_and_known():
    assert {version.rpartition(".")[0] for version in VLLM} == set(vllm.READ)
    assert set(SGLANG) == set(sglang.READ)
    assert {interface.find_obstacle() for interface in (*VLLM.values(), *SGLANG.values())} == {None}


def test_the_fakes_interfaces_are_part_of_the_newest():
    """Tests on the fakes say something of the servers only as far as they have the servers' names."""
    newest, backend = VLLM[max(VLLM)], fake_vllm.fake_backend(None)
    assert {field.name for field in fields(fake_vllm.Common)} <= set(newest.common)
    assert tuple(signature(backend.get_builder_cls().build).parameters)[1:] == newest.build
    assert tuple(signature(backend.get_impl_cls().forward).parameters)[1:8] == newest.forward[:7]
    newest, first = SGLANG[max(SGLANG)], len(sglang.FORWARD)
    assert {field.name for field in fields(fake_sglang.ForwardBatch)} <= {*newest.batch, "mha_return_lse"}  # a mixin's
    assert set(sglang.NEEDED) | set(sglang.WHOLE_ONLY) <= {*newest.batch, "mha_return_lse"}
    assert tuple(signature(fake_sglang.Stock.forward_extend).parameters)[1 : first + 1] == newest.forward[:first]
    fit = SimpleNamespace(
        heads=range(4), kv_heads=range(2), profile=SimpleNamespace(geometry=SimpleNamespace(head_dim=8))
    )
    layer = fake_sglang.FakeEngine(SimpleNamespace(fit=fit)).layer()
    assert set(vars(layer)) == sglang.LAYER <= set(newest.layer)


@pytest.mark.parametrize(
    ("known", "part", "change", "obstacle"),
    [
        (VLLM, "forward", lambda names: (*names, "mask"), "forward takes layer, query, .*mask"),
        (VLLM, "init", lambda names: names[::-1], "an implementation is made with sinks"),
        (VLLM, "build", lambda names: names[:2], "build takes common_prefix_len, common_attn_metadata"),
        (VLLM, "common", lambda names: (*names, "tree"), "CommonAttentionMetadata has tree, which S2O does not know"),
        (VLLM, "cache_update", lambda writes: True, "forward writes the KV cache"),
        (SGLANG, "forward", lambda names: names[1:], "forward_extend takes k, v"),
        (SGLANG, "write", lambda names: names[::-1], "set_kv_buffer takes "),
        (SGLANG, "location", lambda names: ("layer",), "for_layer takes layer"),
        (SGLANG, "reads", lambda names: (*names, "tree"), "its FlashAttention reads tree of a batch, which S2O does"),
        (SGLANG, "batch", lambda names: names[1:], "ForwardBatch has no forward_mode"),
        (SGLANG, "modes", lambda names: ("DECODE",), "ForwardMode has no EXTEND, MIXED"),
        (SGLANG, "layer", lambda names: names[1:], "RadixAttention has no attn_type"),
    ],
)
def test_what_changed_is_named(known, part, change, obstacle):
    for interface in known.values():
        said = replace(interface, **{part: change(getattr(interface, part))}).find_obstacle()
        assert said is not None
        assert re.match(obstacle, said)


def sources_of(known):
    """Sources of a server with this interface and nothing else, by their paths."""

    def written(**classes):
        return "".join(f"class {name}:\n{body}    MAX = 1\n" for name, body in classes.items())

    def method(name, *parameters):
        return f"    def {name}(self, {', '.join(parameters)}): ...\n"

    def names(kept, form="    {}: object = None\n"):
        return "".join(map(form.format, kept))

    if isinstance(known, vllm.VllmInterface):
        flash = written(
            FlashAttentionBackend="    forward_includes_kv_cache_update: bool = False\n",
            FlashAttentionMetadataBuilder=method("build", *known.build[:-1], "*", f"{known.build[-1]}=False"),
            FlashAttentionImpl=method("__init__", *known.init) + method("forward", *known.forward),
        )
        return {vllm.FLASH: flash, vllm.BACKEND: written(CommonAttentionMetadata=names(known.common))}
    first, *others = known.reads
    announce = f"    def init_forward_metadata(self, forward_batch):\n        forward_batch.{first}.sum()\n"
    extend = method("forward_extend", *known.forward).replace(" ...", names(others, "\n        forward_batch.{}"))
    for_layer = f"    @classmethod\n    def for_layer(cls, {', '.join(known.location)}): ...\n"
    radix = "    def __init__(self):\n" + names(known.layer, "        self.{} = None\n")
    modes = names(mode for mode in known.modes if mode != "MAX").replace(": object", "")
    return {
        sglang.FLASH: written(FlashAttentionBackend=announce + extend),
        sglang.BATCH: written(ForwardBatch=names(known.batch)) + f"class ForwardMode:\n{modes}",
        sglang.POOL: written(MHATokenToKVPool=method("set_kv_buffer", *known.write), KVWriteLoc=for_layer),
        sglang.RADIX: written(RadixAttention=radix),
    }


@pytest.mark.parametrize("known", [*VLLM.values(), *SGLANG.values()], ids=[*VLLM, *SGLANG])
def test_an_interface_is_read_from_sources(tmp_path, known):
    interface, sources = type(known), sources_of(known)
    for path, source in sources.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source, encoding="utf-8")
    assert interface.from_sources(tmp_path) == known
    assert find_interface_obstacle(interface, tmp_path) is None
    classes = ("FlashAttentionBackend", "FlashAttentionImpl", "FlashAttentionMetadataBuilder")
    for source, said in (
        ("class A: ...", "there is no class 'FlashAttentionBackend'"),
        ("\n".join(f"class {name}: ..." for name in classes), "FlashAttention(Impl|Backend) has no "),
        ("class", "invalid syntax"),
    ):
        (tmp_path / next(iter(sources))).write_text(source, encoding="utf-8")
        obstacle = find_interface_obstacle(interface, tmp_path)
        assert re.match(f"its sources are not as expected: {said}", obstacle)
    assert "its sources are not as expected" in find_interface_obstacle(interface, tmp_path / "nowhere")


@pytest.fixture(autouse=True)
def _registered_anew():
    yield
    vllm_plugin.register.cache_clear()
    sglang_plugin.register.cache_clear()


def register_twice(plugin):
    """As in a new process; servers may call it more than once."""
    plugin.register.cache_clear()
    plugin.register()
    plugin.register()


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
    register_twice(plugin)
    (record,) = caplog.records
    assert said in record.message


@pytest.fixture
def in_vllm(monkeypatch):
    """A process of vLLM 0.32, or of 0.23, which cannot name backends: its registry's enum, and the paths in it."""
    monkeypatch.delenv(vllm_plugin.CPU_VARIABLE, raising=False)

    def start(names_backends=True, obstacle=None):
        paths = {}
        backends = Enum("AttentionBackendEnum", {"CPU_ATTN": 1, "CUSTOM": 2}, module=REGISTRY)
        if names_backends:
            backends.register = classmethod(lambda cls, name, path: None)

        def register_backend(backend, path):
            paths[getattr(backend, "name", backend)] = path
            if backend == "S2O":  # as vLLM adds a member
                member = object.__new__(backends)
                member._name_, member._value_ = backend, path
                backends._member_map_[backend] = member

        registry = {"AttentionBackendEnum": backends, "register_backend": register_backend}
        requests = type("Request", (), {"from_engine_core_request": staticmethod(lambda request, hasher: request)})
        modules = {"vllm": {"__file__": "vllm/__init__.py"}, REGISTRY: registry, REQUEST: {"Request": requests}}
        put_modules(monkeypatch, modules)
        monkeypatch.setattr(vllm_plugin, "find_interface_obstacle", lambda interface, folder: obstacle)
        vllm_plugin.register.cache_clear()
        return backends, paths

    return start


@pytest.mark.parametrize(("can", "name"), [(True, "S2O"), (False, "CUSTOM")])
def test_vllms_plugin_names_the_backend_and_leaves_an_unknown_vllm_its_own(can, name, in_vllm, monkeypatch, caplog):
    _, paths = in_vllm(can)
    register_twice(vllm_plugin)
    assert (paths, vllm_plugin.get_backend_name()) == ({name: FLASH}, name)
    monkeypatch.setenv(vllm_plugin.CPU_VARIABLE, "support.vllm_cpu.S2OBackend")  # as tests of the engine do
    for obstacle, expected in ((None, {name: FLASH, "CPU_ATTN": "support.vllm_cpu.S2OBackend"}), ("x", {name: STOCK})):
        _, paths = in_vllm(can, obstacle)
        register_twice(vllm_plugin)
        assert paths == expected
    (record,) = caplog.records
    assert record.message == "S2O does not know this vLLM (x): the stock backend runs in its place"


def test_a_process_that_has_not_loaded_plugins_yet_understands_the_name(in_vllm):
    """vLLM's configuration, which names the backend, is pickled for new processes before they load plugins."""
    sender, _ = in_vllm()
    vllm_plugin.register()
    sent = pickle.dumps([sender["S2O"], sender.CPU_ATTN])
    receiver, paths = in_vllm()
    assert pickle.loads(sent) == [receiver["S2O"], receiver.CPU_ATTN]
    assert paths == {"S2O": FLASH}


def test_requests_that_opt_out_find_the_blocks_of_one_another_alone(in_vllm):
    """In vLLM's prefix cache, which only a salt parts; a request's own stays in it."""
    in_vllm()
    vllm_plugin.register()
    for extra, given, salt in (({}, None, None), (None, "a", "a"), (OFF, None, "s2o-off"), (OFF, "a", "as2o-off")):
        request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra), cache_salt=given)
        assert sys.modules[REQUEST].Request.from_engine_core_request(request, None).cache_salt == salt


class MHATokenToKVPool:
    """SGLang's cache of plain rows."""

    start_layer = 3

    def __init__(self, dimensions=3):
        self.dimensions = dimensions

    def get_key_buffer(self, layer):
        assert layer == 3
        return torch.zeros((1,) * self.dimensions)


class SWAKVPool:
    """One with a cache for layers with sliding windows, and one for the others."""

    def __init__(self, full_kv_pool):
        self.full_kv_pool = full_kv_pool


class NativeBackend:
    """SGLang's backend in plain torch."""

    def __init__(self, runner):
        self.runner = runner


def runner(**changes):
    return SimpleNamespace(**{"device": "cpu", "is_draft_worker": False, **changes})


@pytest.fixture
def in_sglang(monkeypatch):
    """A process of an SGLang whose sources are known unless there is an obstacle, and the names in its registry."""
    names = {"choices": ["fa3"], "factories": {}}
    attention = "sglang.srt.layers.attention"
    graphs = {"Backend": SimpleNamespace(FULL="full"), "Phase": SimpleNamespace(PREFILL=0)}
    graphs["check_cuda_graph_backend"] = lambda phase, backend: backend == "full"
    modules = {
        "sglang": {"__version__": "0.9", "__file__": "sglang/__init__.py"},
        f"{attention}.torch_native_backend": {"TorchNativeAttnBackend": NativeBackend},
        f"{attention}.flashattention_backend": {"FlashAttentionBackend": NativeBackend},
        f"{attention}.attention_registry": {
            "register_attention_backend": lambda name: lambda factory: names["factories"].setdefault(name, factory)
        },
        "sglang.srt.arg_groups.choices": {"add_attention_backend_choices": names["choices"].extend},
        "sglang.srt.layers.cp.utils": {"is_cp_active": None},
        "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": None, "MHATokenToKVPool": MHATokenToKVPool},
        "sglang.srt.model_executor.cuda_graph_config": graphs,
        "sglang.srt.model_executor.forward_batch_info": {"ForwardBatch": None},
        "sglang.srt.runtime_context": {"get_flags": None, "get_parallel": None, "get_schedule": None},
    }
    put_modules(monkeypatch, modules)

    def start(obstacle=None):
        monkeypatch.setattr(sglang_engine, "find_interface_obstacle", lambda interface, folder: obstacle)
        return names

    return start


def test_sglangs_plugin_names_a_backend_which_is_the_stock_one_in_an_unknown_sglang_and_for_drafts(in_sglang, caplog):
    names = in_sglang("ForwardMode has no MIXED")
    register_twice(sglang_plugin)
    assert names["choices"] == ["fa3", "s2o"]
    assert type(names["factories"]["s2o"](runner())) is NativeBackend
    (record,) = caplog.records
    assert record.message.startswith("S2O does not know SGLang 0.9 (ForwardMode has no MIXED), only 0.5.23: the stock")
    in_sglang()
    assert type(sglang_engine.create_backend(runner(is_draft_worker=True))) is NativeBackend


@pytest.mark.parametrize(
    ("capability", "said"),
    [
        ((8, 0), "use --cuda-graph-backend-prefill breakable, or serve with another"),
        ((9, 0), "use --cuda-graph-backend-prefill breakable, or serve with another"),
        ((7, 5), r"FlashAttention 3, which has no kernels for compute capability 7\.5 \(8 and 9 only\)"),
        ((10, 0), r"FlashAttention 3, which has no kernels for compute capability 10\.0 \(8 and 9 only\)"),
    ],
)
def test_sglangs_gpu_must_have_flash_attention_3_and_no_full_graphs_of_prompts(
    capability, said, in_sglang, monkeypatch, caplog
):
    in_sglang()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(ConfigError, match=said) as failure:
        sglang_engine.create_backend(runner(device="cuda"))
    (record,) = caplog.records
    assert (record.levelname, record.message) == ("ERROR", f"S2O cannot start: {failure.value}")


@pytest.mark.parametrize(
    ("pool", "translating", "obstacle"),
    [
        (MHATokenToKVPool(), False, None),
        (MHATokenToKVPool(4), False, "the KV cache is a MHATokenToKVPool, not one of plain rows"),
        (SWAKVPool(MHATokenToKVPool()), False, None),
        (SWAKVPool(NativeBackend(None)), False, "the KV cache is a NativeBackend, not one of plain rows"),
        (MHATokenToKVPool(), True, "the KV cache shares its memory with other caches (unified memory)"),
    ],
)
def test_caches_of_other_kinds_are_left_to_sglangs_backend(in_sglang, pool, translating, obstacle):
    in_sglang()
    translator = SimpleNamespace(is_translating=translating)
    assert sglang_engine._find_obstacle(runner(token_to_kv_pool=pool, kv_index_translator=translator)) == obstacle
