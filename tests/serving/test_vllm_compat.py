"""Which vLLM is known, and what the plugin does in its processes; vLLM itself is not here."""

import pickle
from dataclasses import fields
from enum import Enum
from inspect import signature

import pytest

from s2o_runtime.vllm import plugin
from support.fake_vllm import Common, fake_backend
from support.interfaces import recorded
from support.modules import put_modules

INTERFACES = recorded("vllm")
REGISTRY = "vllm.v1.attention.backends.registry"


def test_the_fakes_interface_is_part_of_the_newest():
    """Tests on the fake say something of vLLM only as far as it has vLLM's names."""
    newest = INTERFACES[max(INTERFACES)]
    assert {field.name for field in fields(Common)} <= set(newest.common)
    backend = fake_backend(None)
    assert tuple(signature(backend.get_builder_cls().build).parameters)[1:] == newest.build
    assert tuple(signature(backend.get_impl_cls().forward).parameters)[1:8] == newest.forward[:7]


class _Registry:
    """vLLM's registry of backends, as 0.32 has it, or 0.23, which cannot name one."""

    def __init__(self, names_backends):
        self.paths = {}
        members = {"CPU_ATTN": 1, "CUSTOM": 2}
        self.Enum = Enum("AttentionBackendEnum", members)
        if names_backends:
            self.Enum.register = classmethod(lambda cls, name, path: None)

    def register_backend(self, backend, path):
        self.paths[getattr(backend, "name", backend)] = path
        if backend == "S2O":  # as vLLM adds a member
            member = object.__new__(self.Enum)
            member._name_, member._value_ = backend, path
            self.Enum._member_map_[backend] = member


@pytest.fixture
def vllm(monkeypatch):
    """Put a fake registry in vLLM's place: a function of whether it names backends, and of an obstacle."""
    monkeypatch.delenv(plugin.CPU_VARIABLE, raising=False)

    def installed(names_backends=True, obstacle=None):
        registry = _Registry(names_backends)
        content = {"AttentionBackendEnum": registry.Enum, "register_backend": registry.register_backend}
        put_modules(monkeypatch, {"vllm": {"__file__": "vllm/__init__.py"}, REGISTRY: content})
        monkeypatch.setattr(plugin, "find_interface_obstacle", lambda interface, folder: obstacle)
        plugin.register.cache_clear()
        return registry

    yield installed
    plugin.register.cache_clear()


def test_the_backend_has_a_name_where_vllm_can_name_it(vllm):
    registry = vllm()
    plugin.register()
    plugin.register()  # vLLM may call it more than once
    assert registry.paths == {"S2O": "s2o_runtime.vllm.flash.S2OBackend"}
    assert plugin.get_backend_name() == "S2O"
    registry = vllm(names_backends=False)
    plugin.register()
    assert registry.paths == {"CUSTOM": "s2o_runtime.vllm.flash.S2OBackend"}
    assert plugin.get_backend_name() == "CUSTOM"


def test_a_process_that_has_not_loaded_plugins_yet_understands_the_name(vllm):
    """vLLM's configuration, which names the backend, is pickled for new processes before they load plugins."""
    sender = vllm()
    sender.Enum.__module__, sender.Enum.__qualname__ = REGISTRY, "AttentionBackendEnum"
    plugin.register()
    sent = pickle.dumps([sender.Enum["S2O"], sender.Enum.CPU_ATTN])
    receiver = vllm()
    receiver.Enum.__module__, receiver.Enum.__qualname__ = REGISTRY, "AttentionBackendEnum"
    backend, other = pickle.loads(sent)
    assert backend is receiver.Enum["S2O"]
    assert other is receiver.Enum.CPU_ATTN
    assert receiver.paths == {"S2O": "s2o_runtime.vllm.flash.S2OBackend"}


def test_tests_of_the_engine_take_the_cpus_backend(vllm, monkeypatch):
    monkeypatch.setenv(plugin.CPU_VARIABLE, "support.vllm_cpu.S2OBackend")
    registry = vllm()
    plugin.register()
    assert registry.paths["CPU_ATTN"] == "support.vllm_cpu.S2OBackend"


def test_an_unknown_vllm_runs_its_own_backend_and_says_so_once(vllm, caplog):
    registry = vllm(obstacle="vLLM 9.9: build takes nothing")
    plugin.register()
    plugin.register()
    assert registry.paths == {"S2O": "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"}
    (record,) = caplog.records
    assert record.message == (
        "S2O does not know this vLLM (vLLM 9.9: build takes nothing): the stock backend runs in its place"
    )
