"""Settings of S2O inside vLLM, its start, and what it reports there."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from s2o_runtime.attention.compute import AttentionStats
from s2o_runtime.attention.paged import s2o_attention_paged
from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.errors import ConfigError, ProfileError, S2OError
from s2o_runtime.monitor.counters import EARLY, SAMPLED_EVERY, Counters
from s2o_runtime.monitor.drift import read_error_limits
from s2o_runtime.profile import load_profile
from s2o_runtime.sequences import CallShape
from s2o_runtime.serving.fit import Rank
from s2o_runtime.serving.server import Process, Server, Settings
from s2o_runtime.vllm import engine
from s2o_runtime.vllm.engine import read_settings
from support.fake_server import context
from support.modules import put_modules

DEMO = Path(__file__).parents[2] / "profiles" / "demo" / "cpu" / "mse-0.0001.safetensors"
CPU = torch.device("cpu")
TAKEN = 9009  # a port that another program has
MODEL = Path(__file__).parents[2] / "calibrate" / "demo" / "model"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("S2O_PROFILE", raising=False)


def test_settings_are_read_from_vllms_additional_config(monkeypatch):
    assert read_settings({"s2o": {"profile": "p", "beyond": "s2o", "metrics_port": 9001}}) == Settings(
        Path("p"), "s2o", metrics_port=9001
    )
    assert read_settings({}) == read_settings({"s2o": {}}) == Settings()
    monkeypatch.setenv("S2O_PROFILE", "q")
    assert read_settings({}) == read_settings(None) == Settings(Path("q"))
    assert read_settings({"s2o": {"profile": "p"}}).profile == Path("p")


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("p", "use an object"),
        ({"tau": 1}, '"tau" is not a setting of "s2o" in --additional-config: use beyond, drift'),
        ({"profile": 5}, "profile is 5: expected a file name"),
        ({"profile": ["p"]}, r"profile is \['p'\]: expected a file name"),
        ({"beyond": "warn"}, "beyond is 'warn': expected one of dense, s2o"),
        ({"metrics_port": 0}, "metrics_port is 0: expected a whole number from 1 to 65535 or none"),
        ({"metrics_host": ""}, "metrics_host is '': expected a name"),
        ({"metrics_host": 9001}, "metrics_host is 9001: expected a name"),
        ({"log_every": -1}, "log_every is -1.0: expected a number of seconds of at least 0"),
        ({"drift": "loud"}, "drift is 'loud': expected one of"),
        ({"strict": "no"}, "strict is 'no': expected true or false"),
    ],
)
def test_a_setting_that_is_refused_is_named(section, expected):
    with pytest.raises(ConfigError, match=expected):
        read_settings({"s2o": section})


def demo(**changes):
    """The configuration of the demo model, as vLLM has it."""
    known = {"model_type": "llama", "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2}
    return SimpleNamespace(**known | {"head_dim": 128} | changes)


def started(model=None, settings=Settings(DEMO, strict=False), rank=Rank(1, 2), **changes):  # noqa: B008 (neither changes)
    """The server of a model, the demo model by default, on one of two ranks."""
    return Server(settings, context(model or demo(), rank=rank, **changes))


def test_one_line_says_what_will_run_where(info_log):
    """Or that nothing will; then no memory is taken for calls that will not come."""
    started()
    (line,) = (record.message for record in info_log.records if " in vLLM " in record.message)
    assert "in vLLM 0.32.0: profile" in line
    assert "6 of 6 layers sparse from 1024 to 3072 keys and from 2 new tokens on" in line
    assert line.endswith("rank 1 of 2 holds query heads 4 to 7; all else goes to STOCK")
    server = started(kv_cache_dtype="fp8")
    assert server.obstacle == "the KV cache is fp8, which the profile was not made for"
    assert info_log.messages[-1].endswith(f"in vLLM 0.32.0: all rows go to STOCK: {server.obstacle}")


@pytest.mark.parametrize(
    ("cache", "dtype"),
    [
        ({}, "auto"),
        ({"cache_dtype": "fp8"}, "fp8"),
        ({"cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]}, "auto"),  # each layer is asked
    ],
)
def test_the_type_of_vllms_cache(cache, dtype):
    assert engine._get_cache_dtype(SimpleNamespace(**{"cache_dtype": "auto", **cache})) == dtype


def test_the_demos_limits_are_checked_on_one_rank(info_log):
    server = started(rank=Rank())
    assert {layer.layer for layer in server.fit.layers if layer.drift} == set(server.counters.drift) == set(range(6))
    assert server.fit.layers[0].drift.check.action == "warn"
    assert server.fit.layers[0].drift.check.trial == EARLY < server.fit.layers[0].drift.check.after
    assert not started().counters.drift
    assert not started(settings=Settings(DEMO, strict=False, drift="off"), rank=Rank()).counters.drift
    assert "a rank of several sees its own heads only" in info_log.text


def test_decoder_layers_are_named_by_their_numbers(monkeypatch, info_log):
    """Whose numbers are not those of rows, in a model that has layers of other kinds too."""
    profile = load_profile(DEMO)
    numbers, others = tuple(range(1, 12, 2)), (("sliding_attention", 6),)
    profile = replace(profile, geometry=replace(profile.geometry, layer_numbers=numbers, others=others))
    monkeypatch.setattr("s2o_runtime.serving.server.load_profile", lambda path: profile)
    kinds = ["sliding_attention", "full_attention"] * 6
    server = started(demo(num_hidden_layers=12, sliding_window=48, layer_types=kinds), rank=Rank())
    assert "6 of 6 layers with full attention (6 sliding_attention stay) sparse from 1024" in info_log.text
    assert {number: monitor.layer for number, monitor in server.counters.drift.items()} == {n: n for n in numbers}
    geometry = profile.geometry
    sizes = geometry.query_heads, geometry.kv_heads, geometry.head_dim
    assert [server.fit.find_layer(number, *sizes).drift.allowed for number in numbers] == read_error_limits(profile)


def compiled(monkeypatch, rows, configs=()):
    """The server, and (config, rows, keys) of the calls that compile kernels, which on a CPU are run dense.

    configs: of the layers, in turns, whose calls are not run; the profile's own without them.
    """
    calls = []

    def small(q, k, v, config, **call):
        assert call.pop("backend") == "triton"
        if not configs:
            s2o_attention_paged(q, k, v, config, **call, backend="dense")
        calls.append((config, len(q), call["max_k"]))

    monkeypatch.setattr("s2o_runtime.serving.server.s2o_attention_paged", small)
    server = started()
    for number, layer in enumerate(server.fit.layers if configs else ()):
        monkeypatch.setattr(layer, "config", lambda keys, config=configs[number % 2]: config)
    server.compile_kernels(torch.zeros(rows, 4, 64))
    return server, calls


@pytest.mark.slow(reason="kernels in Triton's interpreter, seconds")
def test_every_configuration_that_is_compiled_alike_runs_once(monkeypatch):
    """With no more rows than a batch has."""
    server, calls = compiled(monkeypatch, 600)
    configs = {layer.config(length) for layer in server.fit.layers for length in server.fit.profile.lengths}
    assert {config.tile for config, _, _ in calls} == {config.tile for config in configs if not config.is_dense}
    assert 0 < len(calls) < 2 * len(configs)
    assert max(rows for _, rows, _ in calls) == 600
    assert all(keys > rows for _, rows, keys in calls)


@pytest.mark.parametrize(("memory", "copied"), [(80e9, True), (8e9, False)])
def test_kernels_of_copied_keys_are_compiled_where_a_cache_may_be_too_large(memory, copied, monkeypatch):
    """Of a few layers that share a GPU's memory."""
    varlen = []
    monkeypatch.setattr(
        "s2o_runtime.serving.server.s2o_attention_varlen", lambda q, k, *_, **call: varlen.append(len(q))
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory))
    asked, on_gpu = Server._may_be_copied, SimpleNamespace(is_cuda=True, device="cuda", element_size=lambda: 2)
    monkeypatch.setattr(Server, "_may_be_copied", lambda self, query: asked(self, on_gpu))
    _, calls = compiled(monkeypatch, 600, (LayerConfig.uniform(4, tau=0.5, tile=TileConfig(64, 64, 2, 4, 2)),) * 2)
    assert varlen == ([rows for _, rows, _ in calls] if copied else [])


@pytest.mark.slow(reason="kernels in Triton's interpreter, seconds")
def test_layers_alike_but_for_segments_or_dense_heads_are_compiled_each(monkeypatch):
    """Of short segments more are scored at once, and dense heads may be split: by other kernels."""
    tile = TileConfig(64, 64, 2, 4, 2)
    short, long = (LayerConfig.uniform(4, tau=0.5, segment=segment, tile=tile) for segment in (128, 512))
    _, calls = compiled(monkeypatch, 8192, (short, long))
    segments = sorted((config.heads[0].segment, -(-rows // config.heads[0].segment)) for config, rows, _ in calls)
    assert segments == [(128, 2), (128, 20), (128, 64), (512, 2), (512, 16)]
    mixed = LayerConfig((HeadConfig(mode="dense"), *short.heads[1:]), tile)
    _, calls = compiled(monkeypatch, 256, (short, mixed))
    modes = [(config.heads[0].mode, rows, keys) for config, rows, keys in calls]
    assert modes == [("s2o", 256, 384), ("dense", 256, 384), ("dense", 16, 8192)]


def test_a_profile_that_does_not_fit_ends_the_start():
    with pytest.raises(ProfileError, match="the served model has 7 layers where the profile has 6"):
        started(demo(num_hidden_layers=7))
    with pytest.raises(ProfileError, match="8 query heads cannot be shared by 3 ranks"):
        started(rank=Rank(0, 3))
    with pytest.raises(ProfileError, match=r"nowhere\.safetensors cannot be read"):
        started(settings=Settings(Path("nowhere.safetensors")))


@pytest.mark.parametrize("given", [{"s2o": {"tau": 1}}, {"s2o": {"profile": "no.safetensors"}}], ids=["tau", "no file"])
def test_what_ends_vllms_start_is_one_line_of_its_log(given, monkeypatch, caplog):
    group, worker = SimpleNamespace(rank_in_group=0), type("Worker", (), {"execute_model": lambda self, step: None})
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=demo(), model=str(MODEL), revision=None, max_model_len=4096),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_rank=0),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16),
        speculative_config=None,
        additional_config=given,
    )
    ranks = {"get_tensor_model_parallel_rank": lambda: 0, "get_tensor_model_parallel_world_size": lambda: 1}
    names = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm.distributed": {"get_pp_group": lambda: group, "get_world_group": lambda: group, **ranks},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        "vllm.v1.worker.gpu_worker": {"Worker": worker},
    }
    put_modules(monkeypatch, names)
    engine.get_server.cache_clear()
    with pytest.raises(S2OError) as failure:
        engine.get_server()
    (record,) = caplog.records
    assert (record.levelname, record.message) == ("ERROR", f"S2O cannot start: {failure.value}")


def test_metrics_answer_on_this_machine_alone_unless_an_address_is_given(monkeypatch, caplog):
    """The default of prometheus_client, which only servers bring, is every address; and there is no password."""
    calls = []

    def start_http_server(port, addr="0.0.0.0", registry=None):
        if port == TAKEN:
            raise OSError(98, "Address already in use")
        calls.append((addr, port, registry.labels))

    class Registry:
        def register(self, collector):
            self.labels = collector._labels

    put_modules(
        monkeypatch, {"prometheus_client": {"start_http_server": start_http_server, "CollectorRegistry": Registry}}
    )
    given = {"profile": str(DEMO), "strict": False, "metrics_port": 9001}
    for section in (given, given | {"metrics_host": "10.0.0.7"}):
        started(settings=read_settings({"s2o": section}), process=Process(7, stage=1, replica=1))
    labels = {"rank": "1", "pp": "1", "dp": "1"}
    assert calls == [("127.0.0.1", 9008, labels), ("10.0.0.7", 9008, labels)]  # behind process 0
    started()
    section = given | {"metrics_port": TAKEN - 1, "metrics_host": "10.0.0.7"}
    started(settings=read_settings({"s2o": section}), process=Process(1))
    assert len(calls) == 2
    assert f"not served at 10.0.0.7, port {TAKEN} ([Errno 98] Address already in use)" in caplog.text


def test_counters_say_where_rows_went(info_log):
    counters = Counters(log_every=1e-9)
    assert counters.summary() == "no rows yet"
    counters.add(0, "s2o", "long", 300)
    counters.add(1, "s2o", "long", 500)
    counters.add(1, "dense", "decode", 200)
    assert counters.shares() == {("s2o", "long"): 0.8, ("dense", "decode"): 0.2}
    shape = CallShape(1, 2, 1, 64, 64, 64, 64)
    stats = AttentionStats("dense", "", LayerConfig.uniform(2, mode="dense"), shape, None, None)
    for is_prompt, early in ((False, 1), (True, EARLY)):
        wanted = [counters.is_sampled(1 + is_prompt, is_prompt) for _ in range(2 * SAMPLED_EVERY)]
        assert [index for index, sampled in enumerate(wanted) if sampled] == [*range(early), SAMPLED_EVERY]
    counters.sampled[1] = stats
    assert counters.densities() == {1: 1.0}
    counters.log_summary()
    assert info_log.messages == ["S2O: 80.0% s2o (long); 20.0% dense (decode); mean density 1.000 of 1 layers"]


def test_every_process_of_vllm_has_a_port_of_its_own():
    """On two pipeline stages of two ranks in three replicas, whose processes vLLM counts together or apart."""
    for together in (True, False):
        numbers = []
        for replica in range(3):
            for world_rank in range(4):
                parallel = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_rank=replica)
                if not together:  # dense models: vLLM keeps the replica's number in another place
                    parallel.data_parallel_rank, parallel.data_parallel_index = 0, replica
                process = engine._find_process(parallel, world_rank + 4 * replica * together, world_rank // 2)
                numbers.append(process.number)
                assert (process.stage, process.replica) == (world_rank // 2, replica)
        assert numbers == list(range(12))


def test_prometheus_collects_the_counters():
    pytest.importorskip("prometheus_client", reason="vLLM brings it")
    from s2o_runtime.monitor.counters import PrometheusCollector

    counters = Counters()
    counters.add(3, "s2o", "long", 300)
    counters.end(3, "s2o", counters.begin(3, "s2o", CPU), CPU)
    rows, density, error, calls, seconds = PrometheusCollector(counters, {"rank": "1"}).collect()
    (sample,) = rows.samples
    assert (sample.name, sample.value) == ("s2o_rows_total", 300)
    assert sample.labels == {"rank": "1", "layer": "3", "path": "s2o", "reason": "long"}
    assert density.samples == error.samples == []
    assert [(sample.name, sample.value) for sample in calls.samples] == [("s2o_calls_total", 1)]
    assert seconds.samples[0].labels == {"rank": "1", "layer": "3", "path": "s2o"}
    assert seconds.samples[0].value > 0
