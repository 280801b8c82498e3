"""Plans: a replay is the call, over random sequences of calls; and what ends a recording, with kernels that remember.

Where there is no GPU, interpreted kernels answer like compiled ones: they can be run again from addresses.
"""

import ctypes
import threading
import types
import weakref

import pytest
import torch
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import _disable_current_modes

from s2o_runtime.attention.api import s2o_attention, s2o_attention_varlen
from s2o_runtime.attention.compute import supports_output
from s2o_runtime.attention.paged import s2o_attention_paged
from s2o_runtime.attention.replay import PLANS, _get_call, find_repeated_call, forget_plans
from s2o_runtime.config import LayerConfig
from s2o_runtime.errors import InputError
from s2o_runtime.kernels import launch as launch_module
from s2o_runtime.kernels import pages, prefill, splits
from s2o_runtime.kernels import plan as plan_module
from s2o_runtime.kernels.launch import is_hooked, launch, observed
from s2o_runtime.kernels.plan import Recorder
from s2o_runtime.kernels.rank import means, order, scores, tail
from support.fake_kernel import FakeKernel, launch_directly
from support.kernels import DEVICE, DTYPE, HOPPER, ON_GPU, PLAIN, count_replays, mixed_config
from support.layouts import edges_of
from support.marks import COMPILED
from support.paging import LAYOUTS, PagedBatch

SLOW = pytest.mark.slow(reason="runs kernels in Triton's interpreter, seconds each")


def kernel_of(pointers):
    """A kernel of so many tensors; it is compiled from the first call on."""
    return FakeKernel(*map("P{}".format, range(pointers)), "n", "stride", "A")


def pretend_gpu(monkeypatch):
    """Make tensors on the CPU look as if they were on the current GPU."""
    launch_directly(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


@pytest.fixture
def gpu(monkeypatch):
    pretend_gpu(monkeypatch)


def do(kernel, *pointers, n=5):
    named = {f"P{i}": pointer for i, pointer in enumerate(pointers)}
    launch(kernel, (3, 2, 1), {**named, "n": n, "stride": 16}, {"A": 1}, num_warps=4)


def recorded(call, *inputs, times=2):
    """The plan of the last of some calls; `call` returns its outputs."""
    for _ in range(times):
        recorder = Recorder(inputs)
        with recorder:
            outputs = call(*inputs)
    return recorder.plan(outputs)


def test_a_plan_keeps_constants_and_hears_its_own_thread_only(gpu):
    """No other memory: of temporaries each has a place of its own, though a freed one's address may come back."""
    kernel, other = kernel_of(4), kernel_of(1)
    made = []

    def call(x):
        out = torch.empty(16)
        for _ in range(2):
            temporary = torch.empty(16)
            made.extend(weakref.ref(tensor) for tensor in (x, out, temporary))
            do(kernel, x, temporary, out, constants[0])
            del temporary
        thread = threading.Thread(target=do, args=(other, x))
        thread.start()
        thread.join()
        return out, None, None

    constants = [torch.zeros(4)]
    kept = weakref.ref(constants[0])
    plan = recorded(call, torch.zeros(16))
    kernel.forget_launches()
    other.forget_launches()
    assert all(reference() is None for reference in made)
    constants.clear()
    assert kept() is not None
    out, *_ = plan.replay((torch.zeros(16),))
    first, second = (launched[9:13] for launched in kernel.direct)
    assert first[1] != second[1]
    assert first[2] == second[2] == out.data_ptr()
    assert not other.direct
    del plan
    assert kept() is None
    with pytest.raises(ZeroDivisionError), Recorder((out,)):
        _ = 1 / 0
    assert observed.listener is None


def with_op(op):
    kernel = kernel_of(3)

    def call(x, *others):
        out, temporary = torch.empty(8), torch.empty(8)
        changed = op(x, temporary)
        do(kernel, x if changed is None else changed, temporary, out)
        return out, None, None

    return call


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(lambda x, temporary: x[:, :8].contiguous(), id="contiguous"),
        pytest.param(lambda x, temporary: torch.nn.functional.pad(x, (0, 16)), id="pad"),
        pytest.param(lambda x, temporary: torch.zeros(8), id="zeros"),
        pytest.param(lambda x, temporary: torch.tensor([1.0, 2.0]), id="tensor"),
        pytest.param(lambda x, temporary: temporary.fill_(1), id="fill"),
        pytest.param(lambda x, temporary: temporary.copy_(x[0, :8]), id="copy"),
        pytest.param(lambda x, temporary: (x[0, 0].item(), None)[1], id="item"),
        pytest.param(lambda x, temporary: (torch.empty(8, device="meta"), None)[1], id="elsewhere"),
    ],
)
def test_what_a_replay_would_not_repeat_ends_the_recording(gpu, op):
    assert recorded(with_op(op), torch.zeros(4, 16)) is None
    assert recorded(with_op(lambda x, temporary: x.mT[None].expand(3, -1, -1)), torch.zeros(4, 16))  # only views


def test_pointers_and_launches_that_are_not_certain_end_the_recording(gpu, monkeypatch):
    call = with_op(lambda x, temporary: None)
    x = torch.zeros(64)
    assert recorded(call, x) is not None
    assert recorded(call, x, x) is None  # which of the two?
    assert recorded(call, x[:16], x[16:]) is not None  # two parts of one tensor
    between = with_op(lambda x, temporary: x.as_strided((4,), (1,), 32))
    assert recorded(between, x[:16], x[16:32]) is None  # a view of neither
    kernel = kernel_of(1)
    assert recorded(lambda x: (do(kernel, x[1:]), None, None), x) is None  # unaligned, through Triton
    assert recorded(lambda x: (None, None, None), x) is None  # no launch
    monkeypatch.setattr(plan_module, "LARGEST_WORKSPACE", 255)
    assert recorded(call, x) is None
    recorder = Recorder([x])
    with recorder:
        outputs = call(x)
    assert recorder.plan(outputs) is None
    recorder.beside = 1  # of the 256 bytes
    assert recorder.plan(outputs) is not None


def test_outputs_that_a_replay_cannot_allocate_end_the_recording(gpu):
    kernel = kernel_of(2)

    def returning(pick):
        def call(x):
            out = torch.empty(4, 8)
            do(kernel, x, out)
            return pick(x, out)

        return call

    for pick in (
        lambda x, out: (x, None, None),
        lambda x, out: (out[1:], None, None),
        lambda x, out: (out[:, :4], None, None),
        lambda x, out: (out, out, None),
    ):
        assert recorded(returning(pick), torch.zeros(16)) is None
    assert recorded(returning(lambda x, out: (out[None].transpose(1, 2), None, None)), torch.zeros(16)) is not None


def test_when_a_plan_does_not_fit(gpu, monkeypatch):
    plan = recorded(with_op(lambda x, temporary: None), torch.zeros(64))
    x = torch.zeros(80)
    assert plan.replay((x[16:],)) is not None
    assert plan.replay((x[1:65],)) is None  # unaligned
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: 1)
        assert plan.replay((x[16:],)) is None
    monkeypatch.setattr(plan_module, "is_hooked", lambda: True)
    assert plan.replay((x[16:],)) is None


CONFIG = LayerConfig.uniform(1, tau=0.5, segment=64, tile=PLAIN)
OPTIONS = (None, "auto", False, False)  # scale, backend, return_stats, return_lse


def test_calls_that_differ_in_anything_but_memory_have_plans_of_their_own(gpu):
    q, k, v = (torch.randn(1, 1, 100, 64) for _ in "qkv")
    start, views = torch.zeros(1, dtype=torch.int64), torch.cat((q, q), 3)[..., :64]
    plain = (q, k, v, None)
    calls = [(plain, CONFIG, OPTIONS), (plain, LayerConfig.uniform(1, tau=0.6, segment=64, tile=PLAIN), OPTIONS)]
    calls += [
        (tensors, CONFIG, OPTIONS)
        for tensors in (
            (q[:, :, :64], k, v, None), (q, k[:, :, :99], v[:, :, :99], None), (views, k, v, None),
            (q, k, v.half(), None), (q, k, v.to("meta"), None), (q, k, v, start), (q, k, v, start.int()),
        )
    ]  # fmt: skip
    calls += [(plain, CONFIG, (0.1, *OPTIONS[1:])), (plain, CONFIG, (None, "triton", False, False))]
    calls += [(plain, CONFIG, (None, "auto", *kept)) for kept in ((True, False), (False, True))]
    calls += [(plain, CONFIG, (*OPTIONS, 100, longest)) for longest in (100, 101)]
    known = [find_repeated_call(*call) for call in calls]
    assert len(set(map(id, known))) == len(calls) == 15
    assert known[0] is find_repeated_call((q.clone(), k.clone(), v.clone(), None), CONFIG, OPTIONS)


def test_gradients_and_other_tensor_types_have_no_plan(gpu, monkeypatch):
    q, k, v = (torch.randn(1, 1, 100, 64) for _ in "qkv")
    v.requires_grad_()
    assert find_repeated_call((q, k, v, None), CONFIG, OPTIONS) is None
    with torch.no_grad():
        assert find_repeated_call((q, k, v, None), CONFIG, OPTIONS) is not None
    parameter = torch.nn.Parameter(q, requires_grad=False)
    assert find_repeated_call((parameter, k, k, None), CONFIG, OPTIONS) is None
    call = find_repeated_call((q, k, k, None), CONFIG, OPTIONS)
    monkeypatch.undo()
    assert [call.make_recorder((q, k, k, None)) for _ in range(4)] == [None] * 4  # on the cpu


def test_the_plans_kept_are_bounded(gpu):
    q, k, v = (torch.randn(1, 1, 100, 64) for _ in "qkv")
    for scale in range(1, PLANS + 100):
        find_repeated_call((q, k, v, None), CONFIG, (scale, *OPTIONS[1:]))
    assert _get_call.cache_info().currsize == PLANS


class Interpreted:
    """An interpreted kernel that answers like a compiled one: it can be run again from addresses."""

    def __init__(self, kernel):
        self.kernel, self.arg_names = kernel, kernel.arg_names

    def __getitem__(self, grid):
        def run(*args, **options):
            self.kernel[grid](*args, **options)
            pointers = [arg for arg in args if isinstance(arg[0] if isinstance(arg, tuple) else arg, torch.Tensor)]
            launch_options = {name: value for name, value in options.items() if name not in self.arg_names}

            def again(x, y, z, stream, function, metadata, a, b, c, *args):
                tensors = [at_address(address, pointer) for address, pointer in zip(args, pointers, strict=False)]
                with _disable_current_modes():  # the interpreter's own tensors
                    self.kernel[x, y, z](*tensors, *args[len(pointers) :], **launch_options)

            return types.SimpleNamespace(run=again, function=None, packed_metadata=None)

        return run


def at_address(address, like):
    """An element in place of a pointer, or a group of them in place of a group."""
    if isinstance(like, tuple):
        return type(like)._make(map(at_address, address, like))
    dtype = like.dtype
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)


@pytest.fixture
def kernels(monkeypatch):
    """The real kernels, recorded and replayed; lists for every call that has a plan whether the plan is used."""
    if ON_GPU:
        if not launch_module._is_tested(triton.__version__):
            pytest.skip(f"no call becomes a plan with Triton {triton.__version__}: see TESTED_TRITONS")
        return count_replays(monkeypatch)
    pretend_gpu(monkeypatch)
    known = {}

    def launch_interpreted(kernel, *args, **options):
        launch(known.setdefault(id(kernel), Interpreted(kernel)), *args, **options)

    for module in (pages, prefill, splits, means, scores, order, tail):
        monkeypatch.setattr(module, "launch", launch_interpreted)
    return count_replays(monkeypatch)


def without_plan(call):
    """The result of a call that leaves the plans that are there alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("s2o_runtime.attention.replay.find_repeated_call", lambda *arguments: None)
        return call()


SCALE = 16 if ON_GPU else 1
HEADS = 4 if ON_GPU else 1
LONGEST = 100 * SCALE
COUNTS = [([100, 50], [100, 90]), ([97, 53], [97, 96]), ([50, 100], [81, 100])]  # whose keys fill 13 pages always


def new_call(kind, counts, config, head_dim):
    """A call of new random tensors: a function that runs it."""
    rows = LONGEST * (3 if kind == "packed" else 2) // 2
    starts = torch.tensor([3, 70], device=DEVICE) if kind == "padded" else None
    q, k, v = (
        torch.randn(2, rows, HEADS, head_dim, device=DEVICE).to(DTYPE).transpose(1, 2)[: 1 + (starts is not None)]
        for _ in "qkv"
    )
    options = {"backend": "triton", "return_stats": True, "return_lse": True}
    queries, lengths = ([SCALE * count for count in side] for side in counts)
    if kind == "paged":
        sizes = {"heads": HEADS, "kv_heads": HEADS, "head_dim": head_dim, "dtype": DTYPE, "device": DEVICE}
        batch = PagedBatch(queries, lengths, 16 * SCALE, LAYOUTS[1], bounds=(LONGEST, LONGEST), **sizes)
        sinks = torch.randn(HEADS, device=DEVICE).to(DTYPE)
        options |= {"total_k": 2 * LONGEST, "sinks": sinks}
        return lambda: batch.paged(config, out=torch.full_like(batch.q, torch.nan), **options)
    if kind == "packed":
        edges = edges_of(queries)
        packed = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
        tensors = *packed, edges, edges, LONGEST, LONGEST
        return lambda: s2o_attention_varlen(*tensors, config, **options)
    if kind == "unaligned":
        memory = torch.empty(q.numel() + 1, dtype=DTYPE, device=DEVICE)
        q = memory[1:].view(q.transpose(1, 2).shape).transpose(1, 2).copy_(q)
    if kind == "filled up":
        q, k, v = (tensor[..., :48].contiguous() for tensor in (q, k, v))
    options |= {"sinks": torch.randn(HEADS, device=DEVICE).to(DTYPE)} if kind == "sinks" else {}
    return lambda: s2o_attention(q, k, v, config, kv_start=starts, **options)


KINDS = ["plain", "unaligned", "padded", "sinks", "packed", "paged", "filled up"]
SEQUENCES = st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True).flatmap(
    lambda kinds: st.lists(st.tuples(st.sampled_from(kinds), st.sampled_from(COUNTS)), min_size=5, max_size=8)
)


def check_sequence(sequence, config, head_dim, replays):
    """Hold every call against the same without plans; the second aligned one is recorded, later ones are replays."""
    forget_plans()
    replays.clear()
    calls, known, expected_replays = dict.fromkeys(KINDS, 0), set(), []
    for kind, counts in sequence:
        kind = "plain" if kind == "unaligned" and config.tile.specialized else kind  # which copies 16 bytes at a time
        call = new_call(kind, counts, config, head_dim)
        expected = without_plan(call)
        result = call()
        assert torch.equal(result.out, expected.out)
        assert result.out.stride() == expected.out.stride()
        assert torch.equal(result.lse, expected.lse)
        assert torch.equal(result.stats.visited, expected.stats.visited)
        assert torch.equal(result.density, expected.density)
        assert (result.stats.backend, result.stats.reason) == (expected.stats.backend, expected.stats.reason)
        key = "plain" if kind == "unaligned" else kind  # which differ in their memory only
        if key in known:
            expected_replays.append(kind != "unaligned")
        else:
            calls[key] += 1
            if 2 <= calls[key] <= 4 and kind not in ("unaligned", "filled up"):
                known.add(key)
    assert replays == expected_replays


FIXED = [(kind, COUNTS[0]) for kind in ("plain", "unaligned", "plain", "plain", "unaligned")]
TILES = [(PLAIN, 64), (HOPPER, 128)] if ON_GPU else [(PLAIN, 64)]


@pytest.mark.parametrize(("tile", "head_dim"), TILES)
def test_a_replayed_call_is_the_call(tile, head_dim, kernels, nan_filled):
    check_sequence(FIXED, mixed_config(HEADS, 0.5, tile=tile), head_dim, kernels)


@SLOW
@pytest.mark.parametrize(("tile", "head_dim"), TILES)
def test_a_replay_is_the_call_over_any_sequence_of_calls(tile, head_dim, kernels, nan_filled):
    config = mixed_config(HEADS, 0.5, tile=tile)
    once = [(kind, counts) for kind in ("padded", "sinks", "packed", "paged") for counts in COUNTS]
    check_sequence(once, config, head_dim, kernels)

    @settings(
        max_examples=20 if ON_GPU else 2, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(SEQUENCES)
    def check_any(sequence):
        check_sequence(sequence, config, head_dim, kernels)

    check_any()


def new_pages(queries, lengths):
    return PagedBatch(
        queries, lengths, 16, LAYOUTS[1], heads=1, kv_heads=1, bounds=(100, 100), dtype=DTYPE, device=DEVICE
    )


@SLOW
def test_outputs_that_kernels_cannot_write_are_copied(kernels, nan_filled):
    """One with gaps, and the queries themselves, which kernels read while they write."""
    with_gaps, itself = (lambda q: q.new_full((*q.shape[:2], 128), torch.nan)[..., :64], lambda q: q)
    for output in (with_gaps, itself, with_gaps, itself):
        batch = new_pages([100, 50], [100, 90])
        out, expected = output(batch.q), without_plan(lambda batch=batch: batch.packed(CONFIG, backend="triton"))
        assert not supports_output(out, batch.q)
        assert torch.equal(batch.paged(CONFIG, total_k=200, out=out, backend="triton"), expected)
    assert kernels == [True, True]  # the third and the fourth


@SLOW
def test_a_plan_checks_what_its_key_does_not_have(kernels):
    for _ in range(2):
        new_pages([100, 50], [100, 90]).paged(CONFIG, total_k=200, backend="triton")
    with pytest.raises(InputError, match=r"out is torch.\w+ \(150, 1, 64\)"):
        new_pages([100, 40], [100, 90]).paged(
            CONFIG, total_k=200, out=torch.zeros(150, 1, 64, dtype=DTYPE, device=DEVICE)
        )
    with pytest.raises(InputError, match="max_seqlen_q is 100"):
        s2o_attention_paged(
            torch.zeros(10, 1, 64), *torch.zeros(2, 9, 16, 1, 64).unbind(0), CONFIG,
            cu_q=torch.tensor([0, 10], dtype=torch.int32), seq_lens=torch.tensor([10], dtype=torch.int32),
            block_table=torch.zeros(1, 8, dtype=torch.int32), max_q=100, max_k=90, total_k=100, backend="triton",
        )  # fmt: skip
    assert not kernels


def test_tools_that_ask_of_compiling_do_not_end_replays(monkeypatch):
    """Such as vLLM's monitor; those that ask of launches do."""
    assert not is_hooked()
    for name in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(triton.knobs.runtime, name, lambda **about: None)
    assert not is_hooked()
    for hooks in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        hooks.add(print)
        try:
            assert is_hooked()
        finally:
            hooks.remove(print)


@COMPILED
@pytest.mark.parametrize("tile", [PLAIN, HOPPER])
@pytest.mark.parametrize("calls_before", [1, 3], ids=["recorded", "replayed"])
def test_cuda_graphs_streams_and_inference_mode_replay_too(tile, calls_before, kernels):
    config = mixed_config(4, 0.5, tile=tile)
    inputs, others = ([torch.randn(1, 4, 1500, 128, device="cuda").to(DTYPE) for _ in "qkv"] for _ in range(2))

    def call(tensors=inputs):
        return s2o_attention(*tensors, config, backend="triton")

    for _ in range(calls_before):
        call()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        out = call()
    for tensor, other in zip(inputs, others, strict=True):
        tensor.copy_(other)
    call([tensor.flip(2).contiguous() for tensor in inputs])  # memory of its own
    graph.replay()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.inference_mode():
        beside = call()
    torch.cuda.synchronize()
    expected = without_plan(call)
    assert torch.equal(out, expected)
    assert torch.equal(beside, expected)
    assert all(kernels[1:])
