"""S2O inside a server's process: its settings, its start, and what it reports there."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from s2o_runtime.attention.compute import AttentionStats
from s2o_runtime.attention.paged import s2o_attention_paged
from s2o_runtime.call import PLAIN
from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.errors import ConfigError, ProfileError, S2OError
from s2o_runtime.monitor.counters import EARLY, SAMPLED_EVERY, Counters, PrometheusCollector
from s2o_runtime.monitor.drift import HEAD_CAP, DriftCheck, read_error_limits
from s2o_runtime.profile import load_profile, save_profile
from s2o_runtime.sequences import CallShape
from s2o_runtime.serving.fit import Rank
from s2o_runtime.serving.server import Process, Server, Settings
from s2o_runtime.sglang import engine as sglang
from s2o_runtime.version import __version__
from s2o_runtime.vllm import engine as vllm
from support.fake_server import context
from support.modules import put_modules
from support.pages import DEMO_PROFILE, ROOT

TAKEN = 9009  # a port that another program has
TILE = TileConfig(64, 64, 2, 4, 2)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("S2O_PROFILE", "S2O_SETTINGS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["vllm", "sglang"])
def read_settings(request, monkeypatch):
    """Reads a section of settings as a server gives it, None for none."""

    def read(section):
        if request.param == "vllm":
            return vllm.read_settings({} if section is None else {"s2o": section})
        monkeypatch.setenv("S2O_SETTINGS", "" if section is None else json.dumps(section))
        return sglang.read_settings()

    return read


def test_settings_are_read_from_the_servers_section_and_the_environment(read_settings, monkeypatch):
    given = {"profile": "p", "beyond": "s2o", "metrics_port": 9001}
    assert read_settings(given) == Settings(Path("p"), "s2o", metrics_port=9001)
    assert read_settings(None) == read_settings({}) == vllm.read_settings(None) == Settings()
    monkeypatch.setenv("S2O_PROFILE", "q")
    assert read_settings(None) == read_settings({}) == Settings(Path("q"))
    assert read_settings({"profile": "p"}).profile == Path("p")
    monkeypatch.setenv("S2O_SETTINGS", "profile=p")
    with pytest.raises(ConfigError, match=r"S2O_SETTINGS is no JSON \(.*\): use an object"):
        sglang.read_settings()


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("p", "use an object"),
        ({"tau": 1}, '"tau" is not a setting of "s2o" in --additional-config: use beyond, drift'),
        ({"profile": ["p"]}, r"profile is \['p'\]: expected a file name"),
        ({"beyond": "warn"}, "beyond is 'warn': expected one of dense, s2o"),
        ({"metrics_port": 0}, "metrics_port is 0: expected a whole number from 1 to 65535 or none"),
        ({"metrics_host": ""}, "metrics_host is '': expected a name"),
        ({"log_every": -1}, "log_every is -1.0: expected a number of seconds of at least 0"),
    ],
)
def test_a_setting_that_is_refused_is_named(section, expected):
    with pytest.raises(ConfigError, match=expected):
        vllm.read_settings({"s2o": section})


def demo(**changes):
    """The configuration of the demo model, as a server has it."""
    known = {"model_type": "llama", "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2}
    return SimpleNamespace(**known | {"head_dim": 128} | changes)


def started(model=None, rank=Rank(1, 2), given=None, **changes):  # noqa: B008 (it never changes)
    """The server of a model, the demo model by default, on one of two ranks."""
    settings = Settings.from_section({"profile": str(DEMO_PROFILE), "strict": False, **(given or {})}, "settings")
    return Server(settings, context(model or demo(), rank=rank, **changes))


def test_one_line_says_what_will_run_where_or_that_nothing_will(info_log):
    started()
    (line,) = (record.message for record in info_log.records if " in vLLM " in record.message)
    assert "in vLLM 0.32.0: profile" in line
    assert "6 of 6 layers sparse from 1024 to 3072 keys and from 2 new tokens on in chunks of 512" in line
    assert line.endswith("rank 1 of 2 holds query heads 4 to 7; all else goes to STOCK")
    server = started(kv_cache_dtype="fp8")
    assert server.obstacle == "the KV cache is fp8, which the profile was not made for"
    assert info_log.messages[-1].endswith(f"in vLLM 0.32.0: all rows go to STOCK: {server.obstacle}")
    excepted = SimpleNamespace(cache_dtype="fp8", kv_cache_dtype_skip_layers=["0"])
    assert vllm._get_cache_dtype(excepted) == "auto"  # each layer is asked
    assert vllm._get_cache_dtype(SimpleNamespace(cache_dtype="fp8")) == "fp8"


@pytest.mark.parametrize(
    ("flops", "max_keys", "ranks", "level", "said"),
    [
        # 8 heads of 128 take 512 tokens with 1400 keys 2.4e9 operations
        (2.4e9, 4096, 1, "INFO", "sparse from 1536 to 3072 keys and from 2 new tokens on in chunks of 512; rank"),
        (2.4e9, 4096, 2, "INFO", "sparse from 2560 to 3072 keys and from 2 new tokens on in chunks of 512; rank"),
        (1e10, 4096, 1, "WARNING", f"chunks of 512 never up to 3072 keys ({DenseReason.HOST}): use chunks of 1024"),
        (1e12, 4096, 1, "WARNING", f"chunks of 512 never up to 3072 keys ({DenseReason.HOST}); rank"),
        (0.0, 700, 1, "WARNING", "never up to 700 keys (shorter than the shortest calibrated length, 1024); rank"),
    ],
)  # fmt: skip
def test_the_start_says_from_which_keys_on_chunks_are_sparse(flops, max_keys, ranks, level, said, info_log):
    server = started(rank=Rank(0, ranks), max_keys=max_keys)
    server.fit.host_flops = flops
    server.log_start()
    assert said in info_log.messages[-1]
    assert info_log.records[-1].levelname == level


def compressed(**activations):
    return {"quant_method": "compressed-tensors", "config_groups": {"a": {"input_activations": activations or None}}}


SHARED_SCALE = "all rows: activations may be rounded with one scale for all rows"


@pytest.mark.parametrize(
    ("changes", "computed"),
    [
        ({}, "only rows that are read"),
        ({"drafter": "ngram"}, "only rows that are read"),
        ({"drafter": "eagle3"}, "all rows: the drafter eagle3 may read hidden states"),
        ({"quantisation": "fp8"}, f"{SHARED_SCALE} (fp8)"),
        ({"checkpoint_has": {"quant_method": "fp8", "activation_scheme": "static"}}, f"{SHARED_SCALE} (fp8)"),
        ({"checkpoint_has": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "only rows that are read"),
        ({"checkpoint_has": {"quant_method": "gptq"}, "quantisation": "gptq_marlin"}, "only rows that are read"),
        ({"checkpoint_has": compressed()}, "only rows that are read"),
        ({"checkpoint_has": compressed(strategy="token")}, "only rows that are read"),
        ({"checkpoint_has": compressed(strategy="tensor")}, f"{SHARED_SCALE} (compressed-tensors)"),
        ({"reads_all": DenseReason.POOLING}, None),
    ],
)
def test_the_last_layer_skips_rows_under_a_budget_of_answers_where_nothing_else_reads_them(
    changes, computed, tmp_path, info_log
):
    model = demo(quantization_config=changes.pop("checkpoint_has", None))
    skips = []
    for kind in ("rel_mse", "kl"):
        info_log.clear()
        profile = replace(load_profile(DEMO_PROFILE), record={"budget": {"kind": kind, "value": 1e-3}})
        save_profile(profile, tmp_path / "p.safetensors")
        server = started(model, given={"profile": str(tmp_path / "p.safetensors")}, **changes)
        skips.append([layer.layer for layer in server.fit.layers if layer.skips_unread])
        said = [message for message in info_log.messages if "the model's last layer computes" in message]
    assert skips == [[], [5] if computed == "only rows that are read" else []]
    assert [message.partition("last layer computes ")[2] for message in said] == ([computed] if computed else [])
    assert server.obstacle == (None if computed else DenseReason.POOLING)


@pytest.mark.parametrize(("ranks", "share"), [(1, 1.0), (2, 2.0), (4, HEAD_CAP)])
def test_each_rank_checks_what_its_heads_may_err_and_turns_layers_dense(ranks, share):
    """No head of a profile may spend more than `HEAD_CAP` times its part of the layer's budget."""
    server = started(rank=Rank(ranks - 1, ranks))
    assert {layer.layer for layer in server.fit.layers if layer.drift} == set(server.counters.drift) == set(range(6))
    check = server.fit.layers[0].drift.check
    assert (check.action, check.every, check.margin) == ("dense", 1, share * DriftCheck().margin)
    assert started(given={"drift": "warn"}).fit.layers[0].drift.check.action == "warn"
    assert not started(given={"drift": "off"}).counters.drift


def test_decoder_layers_are_named_by_their_numbers(monkeypatch, info_log):
    """Whose numbers are not those of rows, in a model that has layers of other kinds too."""
    profile = load_profile(DEMO_PROFILE)
    numbers, others = tuple(range(1, 12, 2)), (("sliding_attention", 6),)
    profile = replace(profile, geometry=replace(profile.geometry, layer_numbers=numbers, others=others))
    monkeypatch.setattr("s2o_runtime.serving.server.load_profile", lambda path: profile)
    kinds = ["sliding_attention", "full_attention"] * 6
    server = started(demo(num_hidden_layers=12, sliding_window=48, layer_types=kinds), rank=Rank())
    assert "6 of 6 layers with full attention (6 sliding_attention stay) sparse from 1024" in info_log.text
    assert {number: monitor.layer for number, monitor in server.counters.drift.items()} == {n: n for n in numbers}
    sizes = profile.geometry.query_heads, profile.geometry.kv_heads, profile.geometry.head_dim
    assert [server.fit.find_layer(number, *sizes).drift.allowed for number in numbers] == read_error_limits(profile)


def compiled(monkeypatch, rows, configs=()):
    """The server, and (config, rows, keys) of the calls that compile kernels, which on a CPU are run dense.

    configs: of the layers, in turns, whose calls are not run; the profile's own without them.
    """
    calls = []

    def small(q, k, v, config, **call):
        assert [call.pop(name) for name in ("backend", "sinks", "softcap", "scale")] == ["triton", None, None, None]
        if not configs:
            s2o_attention_paged(q, k, v, config, **call, backend="dense")
        calls.append((config, len(q), call["max_k"]))

    monkeypatch.setattr("s2o_runtime.serving.server.s2o_attention_paged", small)
    server = started()
    for number, layer in enumerate(server.fit.layers if configs else ()):
        monkeypatch.setattr(layer, "config", lambda keys, config=configs[number % 2]: config)
    again = server.compile_kernels(torch.zeros(rows, 4, 64), PLAIN)
    again[0]()
    assert calls.pop() in calls
    return server, calls


@pytest.mark.slow(reason="kernels in Triton's interpreter, seconds")
def test_every_configuration_that_is_compiled_alike_runs_once(monkeypatch):
    """With no more rows than a batch has."""
    server, calls = compiled(monkeypatch, 300)
    configs = {layer.config(length) for layer in server.fit.layers for length in server.fit.profile.lengths}
    assert {config.tile for config, _, _ in calls} == {config.tile for config in configs if not config.is_dense}
    assert 0 < len(calls) < 2 * len(configs)
    assert max(rows for _, rows, _ in calls) == 300
    assert all(keys > rows for _, rows, keys in calls)


@pytest.mark.parametrize(("memory", "copied"), [(80e9, True), (8e9, False)])
def test_kernels_of_copied_keys_are_compiled_where_a_cache_may_be_too_large(memory, copied, monkeypatch):
    """Of a few layers that share a GPU's memory."""
    varlen, path = [], "s2o_runtime.serving.server.s2o_attention_varlen"
    monkeypatch.setattr(path, lambda q, k, *_, **call: varlen.append(len(q)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory))
    asked, on_gpu = Server._may_be_copied, SimpleNamespace(is_cuda=True, device="cuda", element_size=lambda: 2)
    monkeypatch.setattr(Server, "_may_be_copied", lambda self, query: asked(self, on_gpu))
    _, calls = compiled(monkeypatch, 600, (LayerConfig.uniform(4, tau=0.5, tile=TILE),) * 2)
    assert varlen == ([rows for _, rows, _ in calls] if copied else [])


@pytest.mark.slow(reason="kernels in Triton's interpreter, seconds")
def test_layers_alike_but_for_segments_or_dense_heads_are_compiled_each(monkeypatch):
    """Of many segments more tails are summed at once, and heads of two modes start in an order: by other kernels."""
    short, long = (LayerConfig.uniform(4, tau=0.5, segment=segment, tile=TILE) for segment in (128, 512))
    _, calls = compiled(monkeypatch, 8192, (short, long))
    segments = sorted((config.heads[0].segment, -(-rows // config.heads[0].segment)) for config, rows, _ in calls)
    several = [(128, 4), (128, 16), (128, 64), *[(512, 1)] * 2, (512, 4), (512, 16)]
    assert segments == [*[(128, 1)] * 2, *several]  # a second time with split keys
    mixed = LayerConfig((HeadConfig(mode="dense"), *short.heads[1:]), TILE)
    _, calls = compiled(monkeypatch, 256, (short, mixed))
    modes = [(config.heads[0].mode, rows, keys) for config, rows, keys in calls]
    sizes = ((128, 256), (256, 384), (16, 8192))
    assert modes == [(mode, *size) for mode in ("s2o", "dense") for size in sizes]


def test_a_profile_that_does_not_fit_ends_the_start():
    with pytest.raises(ProfileError, match="the served model has 7 layers where the profile has 6"):
        started(demo(num_hidden_layers=7))
    with pytest.raises(ProfileError, match="8 query heads cannot be shared by 3 ranks"):
        started(rank=Rank(0, 3))


@pytest.mark.parametrize("given", [{"tau": 1}, {"profile": "no.file"}], ids=str)
def test_what_ends_vllms_start_is_one_line_of_its_log(given, monkeypatch, caplog):
    group, worker = SimpleNamespace(rank_in_group=0), type("Worker", (), {"execute_model": lambda self, step: None})
    model = {"hf_config": demo(), "model": str(ROOT / "calibrate/demo/model"), "revision": None, "max_model_len": 4096}
    config = SimpleNamespace(
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_rank=0),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16),
        speculative_config=None,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        additional_config={"s2o": given},
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
    vllm.get_server.cache_clear()
    with pytest.raises(S2OError, match=r"\"tau\" is not|no.file cannot be read") as failure:
        vllm.get_server()
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

    server_of_metrics = {"start_http_server": start_http_server, "CollectorRegistry": Registry}
    put_modules(monkeypatch, {"prometheus_client": server_of_metrics})
    elsewhere = {"metrics_port": 9001, "metrics_host": "10.0.0.7"}
    for given in ({"metrics_port": 9001}, elsewhere):
        started(given=given, process=Process(7, stage=1, replica=1))
    labels = {"rank": "1", "pp": "1", "dp": "1"}
    assert calls == [("127.0.0.1", 9008, labels), ("10.0.0.7", 9008, labels)]  # behind process 0
    started()
    started(given=elsewhere | {"metrics_port": TAKEN - 1}, process=Process(1))
    assert len(calls) == 2
    assert f"not served at 10.0.0.7, port {TAKEN} ([Errno 98] Address already in use)" in caplog.text


def test_counters_say_where_rows_went(info_log):
    counters = Counters(log_every=1e-9)
    assert counters.summary() == "no rows yet"
    for layer, path, reason, rows in ((0, "s2o", "long", 300), (1, "s2o", "long", 500), (1, "dense", "decode", 200)):
        counters.add(layer, path, reason, rows)
    assert counters.shares() == {("s2o", "long"): 0.8, ("dense", "decode"): 0.2}
    for is_prompt, early in ((False, 1), (True, EARLY)):
        wanted = [counters.is_sampled(1 + is_prompt, is_prompt) for _ in range(2 * SAMPLED_EVERY)]
        assert [index for index, sampled in enumerate(wanted) if sampled] == [*range(early), SAMPLED_EVERY]
    shape = CallShape(1, 2, 1, 64, 64, 64, 64)
    counters.sampled[1] = AttentionStats("dense", "", LayerConfig.uniform(2, mode="dense"), shape, None, None)
    assert counters.densities() == {1: 1.0}
    counters.log_summary()
    assert info_log.messages == ["S2O: 80.0% s2o (long); 20.0% dense (decode); mean density 1.000 of 1 layers"]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_every_process_has_a_port_of_its_own(server, apart):
    """On two pipeline stages of two ranks (of SGLang's attention) in replicas, counted together or apart."""
    processes = []
    for replica, stage, rank in ((r, s, t) for r in range(3) for s in range(2) for t in range(2)):
        if server == "vllm":
            parallel = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_rank=replica)
            if apart:  # dense models: vLLM keeps the replica's number in another place
                parallel.data_parallel_rank, parallel.data_parallel_index = 0, replica
            process = vllm._find_process(parallel, 2 * stage + rank + 4 * replica * (not apart), stage)
        else:  # replicas are processes apart, or ranks of attention
            ranks = {"tp_rank": rank, "tp_size": 2, "attn_dp_size": 1, "attn_dp_rank": 0}
            if not apart:
                ranks = {"tp_rank": 2 * replica + rank, "tp_size": 6, "attn_dp_size": 3, "attn_dp_rank": replica}
            process = sglang._find_process(SimpleNamespace(**ranks, pp_rank=stage, pp_size=2, dp_rank=replica))
        assert (process.stage, process.replica) == (stage, replica)
        processes.append(process.number)
    assert sorted(processes) == list(range(12))


def collect(monkeypatch, counters):
    """Return the numbers that Prometheus gets, by metric and the values of its labels behind the rank's."""
    metrics = {}

    class Family:
        def __init__(self, name, meaning, labels):
            self.numbers = metrics.setdefault(name, {})

        def add_metric(self, values, number):
            assert values[0] == "the rank"
            self.numbers[tuple(values[1:])] = number

    families = {"CounterMetricFamily": Family, "GaugeMetricFamily": Family}
    put_modules(monkeypatch, {"prometheus_client.core": families})
    assert list(PrometheusCollector(counters, {"rank": "the rank"}).collect())
    return metrics


def test_prometheus_knows_what_runs_before_any_traffic(monkeypatch):
    given, digest = {"mode": "shadow", "shadow_every": 4}, sha256(DEMO_PROFILE.read_bytes()).hexdigest()[:16]
    servers = [started(given=given), started(kv_cache_dtype="fp8"), started(given={"off_file": str(DEMO_PROFILE)})]
    assert [server.counters.shadow_every for server in servers] == [4, 0, 0]
    enabled = [collect(monkeypatch, server.counters)["s2o_enabled"] for server in servers]
    modes = (("shadow", True), ("s2o", False), ("s2o", False))
    assert enabled == [{(__version__, digest, mode): is_enabled} for mode, is_enabled in modes]


def test_prometheus_collects_the_counters_of_faults_too(monkeypatch):
    counters, cpu = Counters(), torch.device("cpu")
    fault = counters.count_fault(-1, ValueError("y."))
    for path, reason, count in (("s2o", "long", 300), ("dense", fault, 8), ("dense", "x", 9)):
        counters.add(3, path, reason, count)
    counters.end(3, "s2o", counters.begin(3, "s2o", cpu), cpu)
    counters.count_requests("ab")
    counters.compare(3, torch.ones(4), torch.full((4,), 2.0))
    counters.drift[3] = SimpleNamespace(verdict="too much", numbers=lambda: None)
    metrics = collect(monkeypatch, counters)
    assert metrics.pop("s2o_call_seconds")["3", "s2o"] > 0
    rows = {("s2o", "long", "computed"): 300, ("dense", fault, "fault"): 8, ("dense", "x", "unsupported"): 9}
    assert metrics == {
        "s2o_enabled": {("", "", ""): True},
        "s2o_requests": {(): 2},
        "s2o_faults": {("-1", "ValueError"): 1},
        "s2o_drift_verdict": {("3",): True},
        "s2o_shadow_error": {("3",): 0.25},
        "s2o_rows": {("3", *row): count for row, count in rows.items()},
        "s2o_density": {},
        "s2o_error": {},
        "s2o_calls": {("3", "s2o"): 1},
    }


def test_a_fault_of_the_compiler_ends_no_start(monkeypatch):
    def fail(*arguments, **named):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("s2o_runtime.serving.server.s2o_attention_paged", fail)
    server = started()
    server.compile_kernels(torch.zeros(300, 4, 64), PLAIN)
    assert set(server.counters.faults) == {(-1, "RuntimeError")}
