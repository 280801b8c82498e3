"""Plans: recorded with kernels that only remember how they were called, or with interpreted ones that really run."""

import ctypes
import threading
import types
import weakref

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.attention.compute import supports_output
from s2o_runtime.attention.paged import s2o_attention_paged
from s2o_runtime.attention.replay import PLANS, _get_call, find_repeated_call, forget_plans
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.devices import is_interpreted
from s2o_runtime.errors import InputError
from s2o_runtime.kernels import launch as launch_module
from s2o_runtime.kernels import plan as plan_module
from s2o_runtime.kernels.groups import Levels
from s2o_runtime.kernels.launch import is_hooked, launch, observed
from s2o_runtime.kernels.plan import Recorder
from support.paging import LAYOUTS, PagedBatch

SLOW = pytest.mark.slow(reason="runs kernels in Triton's interpreter, seconds each")


TABLE = torch.arange(64)  # was there before any call


class Kernel:
    """Compiled from the first call on; `seen` has the addresses and the rest of every launch."""

    def __init__(self, pointers):
        self.pointers, self.seen = pointers, []
        self.arg_names = [*map("P{}".format, range(pointers)), "n", "stride", "A"]

    def __getitem__(self, grid):
        return lambda *args, **options: types.SimpleNamespace(run=self.run, function="f", packed_metadata="m")

    def run(self, *args):
        self.seen.append((args[:6], args[9 : 9 + self.pointers], args[9 + self.pointers :]))


@pytest.fixture
def gpu(monkeypatch):
    """As if the tensors of the test were on the current GPU."""
    monkeypatch.setattr(launch_module, "_compiled", {})
    monkeypatch.setattr(launch_module, "_is_tested", lambda version: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    forget_plans()
    yield
    forget_plans()


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


@pytest.fixture
def two_launches():
    """Kernels and a call: x, y -> out, through a temporary and a part of it, with a table."""
    first, second = Kernel(3), Kernel(4)

    def call(x, y):
        out = x.new_empty(4, 2, 8).transpose(0, 1)
        temporary, spare = torch.empty(100), torch.empty(3, dtype=torch.int32)
        do(first, x, temporary, spare)
        do(second, temporary[8:], y[16:], out, TABLE, n=6)
        return out, None, None

    return first, second, call


def test_a_replay_passes_its_own_addresses(gpu, two_launches):
    first, second, call = two_launches
    plan = recorded(call, torch.zeros(64), torch.zeros(64))
    first.seen.clear()
    second.seen.clear()
    x, y = torch.zeros(64), torch.zeros(64)
    out, *others = plan.replay((x, y))
    assert others == [None, None]
    assert (out.shape, out.stride(), out.dtype) == ((2, 4, 8), (8, 16, 1), torch.float32)
    [(head, (at_x, temporary, spare), rest)] = first.seen
    assert head == (3, 2, 1, "stream", "f", "m")
    assert at_x == x.data_ptr()
    assert spare - temporary == 512  # 400 bytes, aligned
    assert rest == (5, 16, 1)
    [(_, addresses, rest)] = second.seen
    assert addresses == (temporary + 32, y.data_ptr() + 64, out.data_ptr(), TABLE.data_ptr())
    assert rest == (6, 16, 1)
    again, *_ = plan.replay((x, y))
    assert again.data_ptr() != out.data_ptr()


def test_a_replay_passes_groups_of_its_own_addresses(gpu):
    """Two kernels that take the same two tensors as a group, ahead of one of them alone."""
    kernels = Kernel(3), Kernel(3)

    def call(x):
        out, temporary = torch.empty(8), torch.empty(100)
        for kernel in kernels:
            named = {"P0": x, "P1": Levels(temporary, TABLE), "P2": out}
            launch(kernel, (3, 2, 1), {**named, "n": 5, "stride": (16, 32)}, {"A": 1}, num_warps=4)
        return out, None, None

    plan = recorded(call, torch.zeros(64))
    assert len(plan.groups) == 1  # of both kernels
    for kernel in kernels:
        kernel.seen.clear()
    x = torch.zeros(64)
    out, *_ = plan.replay((x,))
    for kernel in kernels:
        [(_, (at_x, (_, table), at_out), rest)] = kernel.seen
        assert (at_x, table, at_out) == (x.data_ptr(), TABLE.data_ptr(), out.data_ptr())
        assert rest == (5, (16, 32), 1)
    assert kernels[0].seen == kernels[1].seen


def test_a_plan_keeps_no_memory_but_that_of_constants(gpu):
    kernel = Kernel(4)
    made = []

    def call(x):
        out, temporary = torch.empty(8), torch.empty(8)
        made.extend(weakref.ref(tensor) for tensor in (x, out, temporary))
        do(kernel, x, out, temporary, constants[0])
        return out, None, None

    constants = [torch.zeros(4)]
    kept = weakref.ref(constants[0])
    plan = recorded(call, torch.zeros(16))
    assert all(reference() is None for reference in made)
    constants.clear()
    assert kept() is not None
    del plan
    assert kept() is None


def with_op(op):
    kernel = Kernel(3)

    def call(x, *others):
        out, temporary = torch.empty(8), torch.empty(8)
        changed = op(x, temporary)
        do(kernel, x if changed is None else changed, temporary, out)
        return out, None, None

    return call


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(lambda x, temporary: x.clone(), id="clone"),
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


def test_views_do_not_end_it(gpu):
    assert recorded(with_op(lambda x, temporary: x.transpose(0, 1)[None].expand(3, -1, -1)), torch.zeros(4, 16))


def test_pointers_and_launches_that_are_not_certain_end_the_recording(gpu, monkeypatch):
    call = with_op(lambda x, temporary: None)
    x = torch.zeros(64)
    assert recorded(call, x) is not None
    assert recorded(call, x, x) is None  # which of the two?
    assert recorded(call, x[:16], x[16:]) is not None  # two parts of one tensor
    between = with_op(lambda x, temporary: x.as_strided((4,), (1,), 32))
    assert recorded(between, x[:16], x[16:32]) is None  # a view of neither
    kernel = Kernel(1)
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
    kernel = Kernel(2)

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


def test_memory_that_is_used_twice_in_a_call_has_two_places(gpu):
    """A freed tensor's address may come back for another one."""
    kernel = Kernel(2)

    def call(x):
        for _ in range(2):
            temporary = torch.empty(16)
            do(kernel, x, temporary)
            del temporary
        out = torch.empty(16)
        do(kernel, x, out)
        return out, None, None

    plan = recorded(call, torch.zeros(16))
    kernel.seen.clear()
    out, *_ = plan.replay((torch.zeros(16),))
    addresses = [pointers[1] for _, pointers, _ in kernel.seen]
    assert len(set(addresses)) == 3
    assert addresses[2] == out.data_ptr()


def test_a_recording_hears_its_own_thread_only(gpu):
    mine, other = Kernel(1), Kernel(1)
    x = torch.zeros(16)

    def call(x):
        out = torch.empty(4)
        do(mine, out)
        thread = threading.Thread(target=do, args=(other, x))
        thread.start()
        thread.join()
        return out, None, None

    plan = recorded(call, x)
    other.seen.clear()
    plan.replay((x,))
    assert not other.seen
    assert len(mine.seen) == 2
    with pytest.raises(ZeroDivisionError), Recorder((x,)):
        _ = 1 / 0
    assert observed.listener is None


def test_when_a_plan_does_not_fit(gpu, two_launches, monkeypatch):
    plan = recorded(two_launches[2], torch.zeros(64), torch.zeros(64))
    x = torch.zeros(80)
    assert plan.replay((x[:64], x[16:])) is not None
    assert plan.replay((x[:64], x[1:65])) is None  # unaligned
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: 1)
        assert plan.replay((x[:64], x[16:])) is None
    monkeypatch.setattr(plan_module, "is_hooked", lambda: True)
    assert plan.replay((x[:64], x[16:])) is None


CONFIG = LayerConfig.uniform(1, tau=0.5, segment=64, tile=TileConfig(64, 32, 2, 4, 1))


def inputs(length=100, batch=1):
    return tuple(torch.randn(batch, 1, length, 64) for _ in "qkv")


OPTIONS = (None, "auto", False, False)  # scale, backend, return_stats, return_lse


def test_calls_that_differ_in_anything_but_memory_have_plans_of_their_own(gpu):
    q, k, v = inputs()
    base = find_repeated_call((q, k, v, None), CONFIG, OPTIONS)
    assert base is find_repeated_call((q.clone(), k.clone(), v.clone(), None), CONFIG, OPTIONS)
    other = LayerConfig.uniform(1, tau=0.6, segment=64, tile=CONFIG.tile)
    start = torch.zeros(1, dtype=torch.int64)
    views = torch.cat((q, q), 3)[..., :64]
    of_tensors = [
        (q[:, :, :64], k, v, None),
        (q, k[:, :, :99], v[:, :, :99], None),
        (views, k, v, None),
        (q, k, v.half(), None),
        (q, k, v.to("meta"), None),
        (q, k, v, start),
        (q, k, v, start.int()),
    ]
    of_options = [(0.1, "auto", False, False), (None, "triton", False, False), (None, "auto", True, False)]
    of_options += [(None, "auto", False, True), (*OPTIONS, 100, 100), (*OPTIONS, 100, 101)]
    calls = [base, find_repeated_call((q, k, v, None), other, OPTIONS)]
    calls += [find_repeated_call(tensors, CONFIG, OPTIONS) for tensors in of_tensors]
    calls += [find_repeated_call((q, k, v, None), CONFIG, options) for options in of_options]
    assert len(set(map(id, calls))) == len(calls) == 15


def test_gradients_and_other_tensor_types_have_no_plan(gpu, monkeypatch):
    q, k, v = inputs()
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
    q, k, v = inputs()
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
def interpreted_gpu(gpu, monkeypatch):
    """The real kernels; `replays` counts the calls that had a plan."""
    if not is_interpreted():
        pytest.skip("a GPU is here, so kernels are compiled: see tests/gpu")
    from s2o_runtime.kernels import pages, prefill, splits
    from s2o_runtime.kernels.rank import means, order, scores

    known = {}

    def launch_interpreted(kernel, *args, **options):
        launch(known.setdefault(id(kernel), Interpreted(kernel)), *args, **options)

    for module in (pages, prefill, splits, means, scores, order):
        monkeypatch.setattr(module, "launch", launch_interpreted)
    replays = []
    replay = plan_module.LaunchPlan.replay
    monkeypatch.setattr(
        plan_module.LaunchPlan, "replay", lambda plan, inputs: (done := replay(plan, inputs), replays.append(done))[0]
    )
    return replays


def without_plan(call):
    forget_plans()
    return call()


@pytest.mark.parametrize(
    ("starts", "options"),
    [(None, {}), ([3, 70], {"return_lse": True, "return_stats": True, "scale": 0.2})],
    ids=["plain", "left-padded"],
)
def test_a_replayed_call_is_the_call(interpreted_gpu, nan_filled, starts, options):
    batch = 1 if starts is None else len(starts)

    def call(q, k, v):
        kv_start = None if starts is None else torch.tensor(starts)
        result = s2o_attention(q, k, v, CONFIG, kv_start=kv_start, backend="triton", **options)
        return result if isinstance(result, tuple) else (result,)

    for _ in range(2):
        call(*inputs(batch=batch))
    call(*inputs(60, batch=batch))  # another kind in between
    assert not interpreted_gpu
    tensors = inputs(batch=batch)
    again = call(*tensors)
    assert [done is None for done in interpreted_gpu] == [False]
    compare(again, without_plan(lambda: call(*tensors)))


def paged_call(queries, lengths, out=None, q=None, **options):
    """A call of new random tensors, within bounds of 100 queries and keys a sequence; without its plan as well."""
    batch = PagedBatch(queries, lengths, 16, LAYOUTS[1], heads=1, kv_heads=1, bounds=(100, 100))  # of 13 pages always
    batch.q = batch.q if q is None else q
    out = torch.full_like(batch.q, float("nan")) if out is None else out
    before = batch.q.clone()
    options |= {"backend": "triton", "return_stats": True}
    result = batch.paged(CONFIG, total_k=200, out=out, **options)
    assert result.out is out
    batch.q = before
    return result, lambda: batch.packed(CONFIG, **options)


@SLOW
def test_a_replayed_paged_call_is_the_call_of_any_length(interpreted_gpu, nan_filled):
    """The copy out of pages is part of the plan, and the output is written where the caller wants it."""
    for queries in ([100, 50], [70, 60]):  # compiled, recorded
        paged_call(queries, [100, 90])
    assert not interpreted_gpu
    for queries, lengths in (([100, 50], [100, 90]), ([97, 1], [97, 96]), ([33, 100], [81, 100])):
        result, fresh = paged_call(queries, lengths)
        assert interpreted_gpu.pop() is not None
        assert not interpreted_gpu
        out, _, stats = without_plan_of_its_own(fresh)
        assert torch.equal(result.out, out)
        assert torch.equal(result.stats.density, stats.density)


def without_plan_of_its_own(call):
    """A call that leaves the plans that are there alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("s2o_runtime.attention.replay.find_repeated_call", lambda *arguments: None)
        return call()


@SLOW
def test_outputs_that_kernels_cannot_write_are_copied(interpreted_gpu, nan_filled):
    """One with gaps, and the queries themselves, which kernels read while they write."""
    with_gaps, itself = (lambda q: torch.full((*q.shape[:2], 128), float("nan"))[..., :64], lambda q: q)
    for output in (with_gaps, itself, with_gaps, itself):
        q = torch.randn(150, 1, 64)
        assert not supports_output(output(q), q)
        result, fresh = paged_call([100, 50], [100, 90], out=output(q), q=q, return_lse=True)
        expected = without_plan_of_its_own(fresh)
        assert torch.equal(result.out, expected.out)
        assert torch.equal(result.lse, expected.lse)
    assert [done is None for done in interpreted_gpu] == [False, False]  # the third and the fourth


@SLOW
def test_a_plan_checks_what_its_key_does_not_have(interpreted_gpu):
    for _ in range(2):
        paged_call([100, 50], [100, 90])
    with pytest.raises(InputError, match=r"out is torch.float32 \(150, 1, 64\)"):
        paged_call([100, 40], [100, 90], out=torch.zeros(150, 1, 64))
    with pytest.raises(InputError, match="max_seqlen_q is 100"):
        s2o_attention_paged(
            torch.zeros(10, 1, 64), *torch.zeros(2, 9, 16, 1, 64).unbind(0), CONFIG,
            cu_q=torch.tensor([0, 10], dtype=torch.int32), seq_lens=torch.tensor([10], dtype=torch.int32),
            block_table=torch.zeros(1, 8, dtype=torch.int32), max_q=100, max_k=90, total_k=100, backend="triton",
        )  # fmt: skip
    assert not interpreted_gpu


def test_tools_that_ask_of_compiling_do_not_end_replays(monkeypatch):
    """Such as vLLM's monitor; those that ask of launches do."""
    import triton

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


def compare(result, expected):
    assert len(result) == len(expected)
    for ours, theirs in zip(result, expected, strict=True):
        if isinstance(ours, torch.Tensor):
            assert torch.equal(ours, theirs)
            assert ours.stride() == theirs.stride()
        elif ours is None:
            assert theirs is None
        else:
            assert (ours.backend, ours.reason, ours.shape) == (theirs.backend, theirs.reason, theirs.shape)
            assert torch.equal(ours.visited, theirs.visited)
            assert torch.equal(ours.density, theirs.density)


@SLOW
def test_head_dims_that_are_filled_up_are_never_recorded(interpreted_gpu):
    for _ in range(6):
        q, k, v = (tensor[..., :48].contiguous() for tensor in inputs(70))
        s2o_attention(q, k, v, CONFIG, backend="triton")
    assert not interpreted_gpu


def test_a_call_that_does_not_fit_its_plan_runs_the_long_way(interpreted_gpu):
    q, k, v = inputs(70)
    for _ in range(3):
        expected = s2o_attention(q, k, v, CONFIG, backend="triton")
    shifted = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
    assert torch.equal(s2o_attention(shifted, k, v, CONFIG, backend="triton"), expected)
    assert [done is None for done in interpreted_gpu] == [False, True]
