"""Which SGLang is known, and what the plugin and the settings do in its processes; SGLang itself is not here."""

from dataclasses import fields
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from s2o_runtime.errors import ConfigError
from s2o_runtime.serving.server import Settings
from s2o_runtime.sglang import engine, plugin
from s2o_runtime.sglang.compat import COUNTS, FORWARD, LAYER, OF_REQUESTS, OF_TOKENS, WHOLE_ONLY
from s2o_runtime.sglang.engine import read_settings
from support.fake_sglang import FakeEngine, ForwardBatch, Stock
from support.interfaces import recorded
from support.modules import put_modules

INTERFACES = recorded("sglang")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("S2O_PROFILE", "S2O_SETTINGS"):
        monkeypatch.delenv(name, raising=False)


def test_the_fakes_interface_is_part_of_the_newest():
    """Tests on the fake say something of SGLang only as far as it has SGLang's names."""
    newest = INTERFACES[max(INTERFACES)]
    assert {field.name for field in fields(ForwardBatch)} <= {*newest.batch, "mha_return_lse"}  # a mixin's
    assert {*OF_REQUESTS, *OF_TOKENS, *COUNTS} <= set(newest.batch)
    assert set(WHOLE_ONLY) - {"mha_return_lse"} <= set(newest.batch)
    assert tuple(signature(Stock.forward_extend).parameters)[1 : len(FORWARD) + 1] == newest.forward[: len(FORWARD)]
    geometry = SimpleNamespace(head_dim=64)
    fit = SimpleNamespace(heads=range(4), kv_heads=range(2), profile=SimpleNamespace(geometry=geometry))
    assert set(vars(FakeEngine(SimpleNamespace(fit=fit)).layer())) == LAYER <= set(newest.layer)


def test_the_plugin_names_the_backend(monkeypatch):
    choices, factories = ["fa3"], {}

    def register_attention_backend(name):
        return lambda factory: factories.setdefault(name, factory)

    put_modules(
        monkeypatch,
        {
            "sglang.srt.arg_groups.choices": {"add_attention_backend_choices": choices.extend},
            "sglang.srt.layers.attention.attention_registry": {
                "register_attention_backend": register_attention_backend
            },
        },
    )
    plugin.register.cache_clear()
    plugin.register()
    plugin.register()
    assert choices == ["fa3", "s2o"]
    monkeypatch.setattr(engine, "create_backend", lambda runner: ("made", runner))
    assert factories["s2o"]("runner") == ("made", "runner")
    plugin.register.cache_clear()


class NativeBackend:
    """SGLang's backend in plain torch."""

    def __init__(self, runner):
        self.runner = runner


def installed(monkeypatch, tmp_path, obstacle=None):
    put_modules(
        monkeypatch,
        {
            "sglang": {"__version__": "0.9", "__file__": str(tmp_path / "__init__.py")},
            "sglang.srt.layers.attention.torch_native_backend": {"TorchNativeAttnBackend": NativeBackend},
            "sglang.srt.layers.attention.flashattention_backend": {"FlashAttentionBackend": NativeBackend},
        },
    )
    monkeypatch.setattr(engine, "find_interface_obstacle", lambda interface, folder: obstacle)


def runner(**changes):
    return SimpleNamespace(**{"device": "cpu", "is_draft_worker": False, **changes})


def test_an_unknown_sglang_runs_its_stock_backend_with_one_warning(monkeypatch, tmp_path, caplog):
    installed(monkeypatch, tmp_path, "ForwardMode has no MIXED")
    assert type(engine.create_backend(runner())) is NativeBackend
    (record,) = caplog.records
    assert record.message == (
        "S2O does not know SGLang 0.9 (ForwardMode has no MIXED), only 0.5.23: the stock backend runs in its place"
    )


def test_a_draft_model_runs_the_stock_backend(monkeypatch, tmp_path):
    installed(monkeypatch, tmp_path)
    assert type(engine.create_backend(runner(is_draft_worker=True))) is NativeBackend


@pytest.mark.parametrize(("capability", "known"), [((8, 0), True), ((9, 0), True), ((7, 5), False), ((10, 0), False)])
def test_the_gpu_must_have_flash_attention_3(monkeypatch, tmp_path, capability, known, caplog):
    installed(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if known:
        assert engine.get_stock_class(runner(device="cuda")) is NativeBackend
        return
    major, minor = capability
    with pytest.raises(ConfigError, match=rf"no kernels for compute capability {major}\.{minor} \(8 and 9 only\)"):
        engine.create_backend(runner(device="cuda"))
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.message.startswith("S2O cannot start: S2O runs in SGLang with its FlashAttention 3")


def test_cuda_graphs_of_prompts_are_refused(monkeypatch, tmp_path):
    installed(monkeypatch, tmp_path)
    put_modules(
        monkeypatch,
        {
            "sglang.srt.layers.cp.utils": {"is_cp_active": None},
            "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": None},
            "sglang.srt.model_executor.cuda_graph_config": {
                "Backend": SimpleNamespace(DISABLED="disabled"),
                "Phase": SimpleNamespace(PREFILL="prefill"),
                "check_cuda_graph_backend": lambda phase, backend: False,
            },
            "sglang.srt.runtime_context": {"get_parallel": None, "get_schedule": None},
        },
    )
    with pytest.raises(ConfigError, match="add --disable-prefill-cuda-graph, or serve with another"):
        engine.make_api(runner(device="cuda"))


class MHATokenToKVPool:
    start_layer = 3

    def __init__(self, dimensions=3):
        self.dimensions = dimensions

    def get_key_buffer(self, layer):
        assert layer == 3
        return torch.zeros((1,) * self.dimensions)


class SWAKVPool(MHATokenToKVPool):
    pass


@pytest.mark.parametrize(
    ("pool", "translating", "obstacle"),
    [
        (MHATokenToKVPool(), False, None),
        (MHATokenToKVPool(4), False, "the KV cache is a MHATokenToKVPool, not one of plain rows"),
        (SWAKVPool(), False, "the KV cache is a SWAKVPool, not one of plain rows"),
        (MHATokenToKVPool(), True, "the KV cache shares its memory with other caches (unified memory)"),
    ],
)
def test_caches_of_other_kinds_are_left_to_the_stock_backend(monkeypatch, pool, translating, obstacle):
    put_modules(monkeypatch, {"sglang.srt.mem_cache.memory_pool": {"MHATokenToKVPool": MHATokenToKVPool}})
    translator = SimpleNamespace(is_translating=translating)
    assert engine._find_obstacle(runner(token_to_kv_pool=pool, kv_index_translator=translator)) == obstacle


@pytest.mark.parametrize("attention_replicas", [1, 2])
def test_every_process_has_a_port_of_its_own(attention_replicas):
    """In two pipeline stages of four ranks, which are two replicas' in attention; or in two replicas of all of that."""
    places = []
    for replica in range(1 if attention_replicas > 1 else 2):
        for stage in range(2):
            for rank in range(4):
                parallel = SimpleNamespace(
                    tp_rank=rank, tp_size=4, pp_rank=stage, pp_size=2, attn_dp_size=attention_replicas,
                    attn_dp_rank=rank // 2 if attention_replicas > 1 else 0,
                    dp_rank=rank // 2 if attention_replicas > 1 else replica,
                )  # fmt: skip
                places.append(engine._find_process(parallel))
                assert places[-1].stage == stage
                assert places[-1].replica == (rank // 2 if attention_replicas > 1 else replica)
    assert [place.number for place in places] == list(range(len(places)))


def test_settings_are_read_from_the_environment(monkeypatch):
    assert read_settings() == Settings()
    monkeypatch.setenv("S2O_PROFILE", "q")
    assert read_settings() == Settings(Path("q"))
    monkeypatch.setenv("S2O_SETTINGS", '{"profile": "p", "beyond": "s2o", "metrics_port": 9001}')
    assert read_settings() == Settings(Path("p"), "s2o", metrics_port=9001)


def test_settings_that_are_no_json_are_named(monkeypatch):
    """What is wrong in an object is said by `Settings.of`, as for vLLM."""
    monkeypatch.setenv("S2O_SETTINGS", "profile=p")
    with pytest.raises(ConfigError, match=r"S2O_SETTINGS is no JSON \(.*\): use an object"):
        read_settings()
