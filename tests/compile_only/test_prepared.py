"""What a prepared launch hands to the driver, against what Triton would have bound for the same tensors."""

import ctypes
import os
import types
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels, which the interpreter replaces", allow_module_level=True)

from tests.compile_only.compiled import compile_launch
from tests.compile_only.launches import Launch
from tests.compile_only.targets import ARCHS
from torch_fdattn import checks
from torch_fdattn.launch import driver_launch, launches, prepared, tensor_map
from torch_fdattn.launch.driver_launch import flat
from torch_fdattn.launch.launches import Launch as Each
from torch_fdattn.ops import (
    library,
    row_ranges,
)
from torch_fdattn.ops.append_kv.arguments import Append
from torch_fdattn.ops.append_kv.kernel import launch_append
from torch_fdattn.ops.attention import backward as attention_backward
from torch_fdattn.ops.attention import derivative_op
from torch_fdattn.ops.attention import forward as attention_forward
from torch_fdattn.ops.attention import op as attention_op
from torch_fdattn.ops.attention.backward import launch_backward
from torch_fdattn.ops.attention.configs import BackwardConfig, TileConfig
from torch_fdattn.ops.attention.dropout import Dropout
from torch_fdattn.ops.attention.forward import launch_forward
from torch_fdattn.ops.merge_states.kernel import _merge_kernel, launch_merge
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.packed import Packed, by_heads
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.rotary_kernel import launch_norm_rotate
from torch_fdattn.ops.scores import Scores
from torch_fdattn.ops.varlen_attention import op as varlen_op

TILE = TileConfig(32, 32, 4, 1)


class Driver:
    """Stands where CUDA's driver does, and reads what a launch would."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int | float]]] = []  # grid, parameters
        self.layouts: dict[int, list] = {}

    def cuLaunchKernelEx(self, config, function, parameters, extra) -> int:
        layout = self.layouts[function.value]
        values = [kind.from_address(at).value for at, kind in zip(parameters, layout, strict=True)]
        self.calls.append((list(config.contents.grid), values))
        return 0


@pytest.fixture
def driver(monkeypatch) -> Driver:
    driver = Driver()
    init = driver_launch.DriverLaunch.__init__

    def noted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        driver.layouts[self._function.value] = self.layout

    monkeypatch.setattr(driver_launch.DriverLaunch, "__init__", noted)
    monkeypatch.setattr(driver_launch, "loaded", lambda: driver)
    monkeypatch.setattr(launches, "on_gpu", lambda device: True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    prepared.forget()
    yield driver
    prepared.forget()


@pytest.fixture
def through_triton():
    """The launches that went through Triton, compiled for sm_90 instead of run."""
    seen: list[Launch] = []
    compiled = {}

    def run(self, *args, grid, warmup, **kwargs):
        seen.append(Launch(self, args, kwargs))
        if self not in compiled:
            made = compile_launch(seen[-1], ARCHS["sm_90"])
            compiled[self] = types.SimpleNamespace(
                src=made.src, metadata=made.metadata, function=len(compiled) + 1, asm=made.asm
            )
        seen[-1] = seen[-1], grid, compiled[self]
        return compiled[self]

    with mock.patch.object(JITFunction, "run", run):
        yield seen


def bound(launch: Launch, grid, compiled) -> tuple[list[int], list[int | float]]:
    """(grid, parameters) as Triton would bind them."""
    own = {k: v for k, v in launch.kwargs.items() if k in launch.kernel.signature.parameters}
    arguments = launch.kernel.signature.bind(*launch.args, **own)
    arguments.apply_defaults()
    pairs = list(flat(compiled.src.signature.values(), arguments.args))
    values = [x.data_ptr() if kind.startswith("*") else x for kind, x in pairs]
    return [*grid, 1, 1], [*values, 0, 0]


class Pool:
    """Tensors by the order in which a call asks for them: calls of one pool have the same addresses."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.next = 0

    def __call__(self, *shape, dtype=torch.float16, device=None) -> torch.Tensor:
        shape = shape[0] if shape and isinstance(shape[0], tuple | list) else shape
        if self.next == len(self.tensors):
            self.tensors.append(torch.zeros(shape, dtype=dtype))
        self.next += 1
        return self.tensors[self.next - 1]


draw = Pool()


def call_with(pool: Pool, name: str) -> None:
    global draw
    draw, pool.next = pool, 0
    like = lambda x, *shape, **kw: pool(*(shape or x.shape), dtype=kw.get("dtype", x.dtype))  # noqa: E731
    with (
        mock.patch.object(torch, "empty", pool), mock.patch.object(torch, "empty_like", like),
        mock.patch.object(torch.Tensor, "new_empty", like),
    ):  # fmt: skip
        CALLS[name]()


def forward(case: str):
    """A call of attention's forward: on new tensors each time."""
    q, k, v = (draw(2, heads, 64, 32) for heads in (4, 2, 2))
    out, lse, lens = draw(2, 4, 64, 32), draw(2, 4, 64, dtype=torch.float32), None
    scores, dropout = Scores(), Dropout()
    if case == "features":
        lens = draw(2, dtype=torch.int32)
        slopes, sinks = draw(4, dtype=torch.float32), draw(4)
        scores = Scores(30.0, slopes, sinks, draw(4, 64, 64))
        dropout = Dropout(0.25, draw(2, dtype=torch.int64))
    options = AttentionOptions(Mask(lens, None, lens, 9, 0), 0.5, scores, dropout)
    launch_forward(q, k, v, options, out, lse, TILE)


def pages() -> None:
    q, lens = by_heads(draw(40, 4, 32)), draw(3, dtype=torch.int32)
    k, v = (draw(20, 2, 16, 32) for _ in range(2))
    out, lse = by_heads(draw(40, 4, 32)), draw(4, 40, dtype=torch.float32)
    packed = Packed(draw(4, dtype=torch.int32), None, draw(3, 6, dtype=torch.int32))
    options = AttentionOptions(Mask(lens, window_right=0), 0.5)
    launch_forward(q, k, v, options, out, lse, config=TILE, packed=packed)


def backward(case: str) -> None:
    q, out, dout, dq = (draw(2, 4, 64, 32) for _ in range(4))
    k, v, dk, dv = (draw(2, 2, 64, 32) for _ in range(4))
    lse, dlse = (draw(2, 4, 64, dtype=torch.float32) for _ in range(2))
    scores = score_grads = Scores()
    if case == "gradients":
        slopes, bias = draw(4, dtype=torch.float32), draw(4, 64, 64)
        scores = Scores(alibi_slopes=slopes, attn_mask=bias)
        score_grads = Scores(
            alibi_slopes=draw(*slopes.shape, dtype=torch.float32), attn_mask=draw(4, 64, 64)
        )
    launch_backward(
        dout, dlse if case == "plain" else None, q, k, v, out, lse, AttentionOptions(Mask(window_right=0), 0.5, scores),
        dq, dk, dv, score_grads, config=BackwardConfig(TILE, TILE),
    )  # fmt: skip


def packed_backward() -> None:
    q, out, dout, dq = (by_heads(draw(96, 4, 32)) for _ in range(4))
    k, v, dk, dv = (by_heads(draw(80, 2, 32)) for _ in range(4))
    lse, slopes = draw(4, 96, dtype=torch.float32), draw(3, 4, dtype=torch.float32)
    begins = Packed(*(draw(4, dtype=torch.int32) for _ in range(2)))
    scores, score_grads = (
        Scores(alibi_slopes=x) for x in (slopes, draw(*slopes.shape, dtype=torch.float32))
    )
    launch_backward(
        dout, None, q, k, v, out, lse, AttentionOptions(Mask(), 0.5, scores), dq, dk, dv, score_grads,
        config=BackwardConfig(TILE, TILE), packed=begins,
    )  # fmt: skip


def append() -> None:
    k_cache, v_cache = draw(2, 2, 64, 32), draw(2, 2, 64, 32)
    launch_append(
        Append(k_cache, v_cache, None, draw(2, 2, 1, 32), draw(2, 2, 1, 32), draw(2, dtype=torch.int32))
    )  # fmt: skip


def merge() -> None:
    outs, lses = draw(3, 2, 4, 5, 32), draw(3, 2, 4, 5, dtype=torch.float32)
    launch_merge(outs, lses, draw(2, 4, 5, 32), draw(2, 4, 5, dtype=torch.float32))


def rotation() -> None:
    q, k, q_out, k_out = (draw(1, 6, heads, 32) for heads in (4, 2, 4, 2))
    cos, sin = (draw(1, 1, 6, 16, dtype=torch.float32) for _ in range(2))
    launch_norm_rotate(q, k, q_out, k_out, cos, sin, draw(32), draw(32), 1e-6)


CALLS = {
    "forward": lambda: forward("plain"), "forward, features": lambda: forward("features"), "pages": pages,
    "backward": lambda: backward("plain"), "backward, gradients": lambda: backward("gradients"),
    "packed backward": packed_backward, "append": append, "merge": merge, "rotation": rotation,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_third_launch_is_direct(name: str, driver: Driver, through_triton: list) -> None:
    built_with, later = Pool(), Pool()
    for _ in range(2):
        call_with(built_with, name)
        assert not driver.calls
    launched = len(through_triton)
    assert launched in (2, 4, 6, 8, 10)
    call_with(later, name)
    assert len(through_triton) == launched
    assert len(driver.calls) == launched // 2
    prepared.forget()
    call_with(later, name)
    for found, triton_launch in zip(driver.calls, through_triton[launched:], strict=True):
        grid, parameters = bound(*triton_launch)
        assert found[0] == grid
        assert found[1] == pytest.approx(parameters)


def test_what_must_not_be_repeated(driver: Driver, through_triton: list, monkeypatch) -> None:
    """Other numbers, dtypes, addresses off by 8 bytes, another device, a profiler: each through Triton."""
    outs, lses = torch.zeros(3, 2, 4, 5, 32), torch.zeros(3, 2, 4, 5)
    out, lse = torch.zeros(2, 4, 5, 32), torch.zeros(2, 4, 5)

    def goes_through_triton(*tensors) -> bool:
        before = len(through_triton), len(driver.calls)
        launch_merge(*tensors)
        after = len(through_triton), len(driver.calls)
        assert sum(after) == sum(before) + 1
        return after[0] > before[0]

    assert [goes_through_triton(outs, lses, out, lse) for _ in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    assert goes_through_triton(outs[:2], lses[:2], out, lse)
    assert goes_through_triton(outs, lses, out.half(), lse)
    assert goes_through_triton(outs.half(), lses, out, lse)
    shifted = torch.zeros(42)[2:].view(2, 4, 5)
    assert shifted.data_ptr() % 16 == 8
    assert [goes_through_triton(outs, lses, out, shifted) for _ in range(3)] == [True] * 3
    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
        assert goes_through_triton(outs, lses, out, lse)
    with monkeypatch.context() as patch:
        patch.setattr(driver_launch, "somebody_watches", lambda: True)
        assert goes_through_triton(outs, lses, out, lse)
    assert not goes_through_triton(outs, lses, out, lse)
    monkeypatch.setattr(prepared, "MAX_CALLS", len(prepared._calls))
    assert goes_through_triton(outs[:1], lses[:1], out, lse)
    assert len(prepared._calls) == 1


def merges(*calls: tuple[torch.Tensor, ...]) -> Iterator[Each]:
    """Launches that merge, one for each (outs, lses, out, lse)."""
    for outs, lses, out, lse in calls:
        of = outs.stride(), lses.stride(), out.stride()
        yield Each(
            _merge_kernel,
            40,
            outs,
            lses,
            out,
            lse,
            *of,
            len(outs),
            4,
            5,
            32,
            BLOCK_PARTS=4,
            BLOCK_D=32,
        )


def made(call: prepared.PreparedCall, named: Sequence, *launched: tuple[torch.Tensor, ...]) -> bool:
    """A prepared call as ops make it; whether by the driver."""
    if call.by_driver(named):
        return True
    call.run(named, merges(*launched))
    return False


def states(count: int = 3) -> tuple[torch.Tensor, ...]:
    outs, lses = torch.zeros(count, 2, 4, 5, 32), torch.zeros(count, 2, 4, 5)
    return outs, lses, torch.zeros(2, 4, 5, 32), torch.zeros(2, 4, 5)


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [x.data_ptr() for x in tensors]


def test_a_prepared_call(driver: Driver, through_triton: list, monkeypatch) -> None:
    """The third is the driver's; not where an address is odd, nor where a profiler looks on."""
    call = prepared.PreparedCall()
    by_driver = lambda tensors: made(call, tensors, tensors)  # noqa: E731
    assert [by_driver(states()) for _ in range(4)] == [False, False, True, True]
    tensors = states()
    assert by_driver(tensors)
    assert driver.calls[-1][1][:4] == addresses(tensors)
    odd = torch.zeros(1290)[2:1282].view(2, 4, 5, 32)
    assert not by_driver((*tensors[:2], odd, tensors[3]))
    with monkeypatch.context() as patch:
        patch.setattr(driver_launch, "somebody_watches", lambda: True)
        assert not by_driver(tensors)
    assert by_driver(tensors)


def test_calls_that_are_remembered(monkeypatch) -> None:
    """Not where values are checked, nor by an option without a hash; all are forgotten where there are too many."""
    call = prepared.prepare(("a", 1))
    assert prepared.checked(("a", 1)) is call
    assert prepared.checked(("a", 2)) is prepared.checked(None) is None
    with monkeypatch.context() as patch:
        patch.setattr(checks, "CHECK_VALUES", True)
        assert prepared.checked(("a", 1)) is None
    prepared.prepare(("a", [1]))
    assert prepared.checked(("a", [1])) is None
    monkeypatch.setattr(prepared, "MAX_CALLS", len(prepared._calls))
    prepared.prepare(("b",))
    assert prepared.checked(("a", 1)) is None


def test_two_launches_of_one_call(driver: Driver, through_triton: list) -> None:
    """Each with its own tensors, in whatever order the call names them."""
    call = prepared.PreparedCall()
    for times in range(5):
        first, second = states(3), states(2)
        done = made(call, (*second, None, *first), first, second)
        assert done == (times > 1)
        if done:
            assert [x[1][:4] for x in driver.calls[-2:]] == [addresses(first), addresses(second)]


def test_few_calls_pay_for_what_cannot_be_bound(driver: Driver, through_triton: list, monkeypatch) -> None:  # fmt: skip
    """k that is v, say: which of the two a launch takes is not certain."""
    tries = []
    monkeypatch.setattr(prepared, "_bound", lambda made, tensors: tries.append(None) or ())
    call = prepared.PreparedCall()
    for times in range(1, 20):
        outs, lses, out, lse = states()
        assert not made(call, (outs, outs, lses, out, lse), (outs, lses, out, lse))
        assert len(tries) == times.bit_length() - 1


def test_views_that_a_launch_takes(driver: Driver, through_triton: list) -> None:
    """By the memory of the call's tensors in which they lie."""
    call = prepared.PreparedCall()
    for times in range(4):
        outs, lses, out, _ = states()
        scratch = torch.zeros(64)
        lse = scratch[16:56].view(2, 4, 5)
        assert made(call, (outs, lses, out, scratch), (outs, lses, out, lse)) == (times > 1)
    assert driver.calls[-1][1][3] == scratch.data_ptr() + 64


@pytest.mark.parametrize("what", ["another", "twice", "begins alike"])
def test_tensors_of_which_nobody_knows_the_place(
    what: str, driver: Driver, through_triton: list
) -> None:
    """Always through Triton: memory that is not the call's, or of which two of the call's may be meant."""
    call = prepared.PreparedCall()
    for _ in range(4):
        outs, lses, out, lse = states()
        named = {
            "another": (outs, lses, out), "twice": (outs, lses, out, lse, lse), "begins alike": (out.view(-1), out, lses, lse)
        }[what]  # fmt: skip
        launch = (outs, lses, out.view(out.shape), lse)
        assert not made(call, named, launch)
    assert not driver.calls


def test_an_alias_now_is_none_later(driver: Driver, through_triton: list) -> None:
    """Two views of one memory are told apart, since the launch takes the call's own objects."""
    call = prepared.PreparedCall()
    for times in range(4):
        outs, lses, out, lse = states()
        other = outs if times > 1 else outs.view(outs.shape)
        assert made(call, (other, outs, lses, out, lse), (outs, lses, out, lse)) == (times > 1)
    other = torch.zeros_like(outs)
    made(call, (other, outs, lses, out, lse), (outs, lses, out, lse))
    assert driver.calls[-1][1][0] == outs.data_ptr()


@pytest.fixture
def on_a_gpu(driver: Driver, through_triton: list, monkeypatch):
    """Raw ops take tensors for a GPU's."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(library, "use_triton", lambda *_: True)
    monkeypatch.setattr(attention_op.dispatch, "choose", lambda *_: "triton")
    for module in (attention_forward, attention_backward):
        monkeypatch.setattr(module, "device_capability", lambda _: (9, 0))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("strided", ["lse", "dlse"])
def test_copies_are_no_tensors_of_the_call(
    strided: str, packed: bool, driver: Driver, on_a_gpu
) -> None:
    """What a kernel takes in place of a strided tensor is not there when the call comes again."""
    op, lead = (varlen_op, ()) if packed else (derivative_op, (2,))
    lens, where = draw(2, dtype=torch.int32), (draw(3, dtype=torch.int32), None) if packed else ()
    q = draw((96, 4, 32) if packed else (2, 4, 96, 32))
    rows = {"lse": draw((*lead, 4, 96), dtype=torch.float32), "dlse": draw((*lead, 4, 96), dtype=torch.float32)}  # fmt: skip
    rows[strided] = rows[strided].mT.contiguous().mT
    given = q, rows["dlse"], q.clone(), q.clone(), q.clone(), q.clone(), rows["lse"], *where
    rest = lens, None, None, -1, 0, 0, 0, 0.5, None
    for _ in range(4):
        given = (
            *(
                None if x is None else x.clone(memory_format=torch.preserve_format)
                for x in given[:7]
            ),
            *where,
        )
        op._backward(*given, *rest)
        for _, values in driver.calls[-3:]:
            assert (
                given[list(("dout", "dlse", "q", "k", "v", "out", "lse")).index(strided)].data_ptr()
                not in values
            )


@pytest.mark.parametrize(("packed", "row"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_known_calls_of_attention(
    way: str, packed: bool, row: bool, driver: Driver, on_a_gpu, monkeypatch
) -> None:
    """Past its checks a raw op hands the driver what it does with them."""
    of_attention = attention_op if way == "forward" else derivative_op
    op, name = (varlen_op, "check_varlen") if packed else (of_attention, "check_inputs")
    checked = mock.Mock(wraps=getattr(op, name))
    monkeypatch.setattr(op, name, checked)

    def call() -> None:
        shape, of_keys = ((96, 4, 32), (96, 2, 32)) if packed else ((2, 4, 96, 32), (2, 2, 96, 32))
        of_lse = (4, 96) if packed else shape[:3]
        q, k, v = draw(shape), draw(of_keys), draw(of_keys)
        lens = draw(2, dtype=torch.int32)
        slopes, seed = draw(4, dtype=torch.float32), draw(2, dtype=torch.int64)
        where = (draw(3, dtype=torch.int32), None) if packed else ()
        mask = draw((2, 1, 1, 96), dtype=torch.bool) if row else None
        rest = lens, None, None, -1, 0, 0, 0, 0.5, None, 0.0, slopes, None, mask, 0.25, seed
        if way == "forward":
            op._forward(q, k, v, *where, *((None,) if packed else ()), *rest)
        else:
            state = draw(shape), draw(of_lse, dtype=torch.float32), q, k, v, draw(shape)
            op._backward(*state, draw(of_lse, dtype=torch.float32), *where, *rest)

    monkeypatch.setitem(CALLS, "attention", call)
    monkeypatch.setattr(row_ranges, "MIN_KEYS", 1)
    pool, launched = Pool(), {"forward": 1, "backward": 3}[way] + row
    for _ in range(4):  # the first is checked, the first two go through Triton
        call_with(pool, "attention")
        assert checked.call_count == 1
    assert len(driver.calls) == 2 * launched
    assert driver.calls[:launched] == driver.calls[launched : 2 * launched]
    with monkeypatch.context() as patch:
        patch.setattr(attention_op.tuning.state, "active", True)
        patch.setattr(attention_op.tuning, "chosen", lambda op, config, *_: config)
        call_with(pool, "attention")
    assert checked.call_count == 2


def test_strided_lengths_go_through_their_copies(driver: Driver) -> None:
    q, lens = torch.zeros(2, 4, 96, 32), torch.zeros(4, dtype=torch.int32)
    call = mock.Mock(by_driver=lambda tensors: True)
    prepared_with = lambda lens: attention_op.attend_prepared(call, q, q, q, (lens, *[None] * 5))  # noqa: E731
    assert prepared_with(lens[:2]) is not None
    assert prepared_with(lens[::2]) is None


@triton.jit
def _copy_kernel(y_ptr, x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at[:, None] * BLOCK + at[None, :], x.load([0, 0]))


class Mapper(Driver):
    """A driver that makes tensor maps: what they were made of in the place of what it would encode."""

    VERSION = 13000

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple] = []

    def cuTensorMapEncodeTiled(self, at, kind, rank, address, sizes, strides, block, steps, *rest) -> int:  # fmt: skip
        assert at.value % 64 == 0
        about = kind, list(sizes), list(strides)[: rank - 1], list(block), list(steps), rest
        self.made.append((address.value, *about))
        ctypes.memmove(at.value, (ctypes.c_uint64 * 2)(len(self.made), 1 << 21 | 5), 16)
        return 0

    def cuDriverGetVersion(self, version) -> int:
        version._obj.value = self.VERSION
        return 0

    def cuLaunchKernelEx(self, config, function, parameters, extra) -> int:
        layout = self.layouts[function.value]
        places = [i for i, kind in enumerate(layout) if ctypes.sizeof(kind) == 128]
        self.maps = [list((ctypes.c_uint64 * 2).from_address(parameters[i])) for i in places]
        return super().cuLaunchKernelEx(config, function, parameters, extra)


@pytest.fixture
def mapper(driver: Driver, monkeypatch) -> Mapper:
    mapper = Mapper()
    mapper.layouts = driver.layouts
    monkeypatch.setattr(driver_launch, "loaded", lambda: mapper)
    return mapper


def copied(y: torch.Tensor, x: torch.Tensor, **options) -> None:
    described = TensorDescriptor(x, [64, 64], [x.stride(0), 1], [64, 64], **options)
    launches.launch(_copy_kernel, 1, y, described, 64)


@triton.jit
def _fill_kernel(y, BLOCK: tl.constexpr):
    y.store([0, 0], tl.zeros([BLOCK, BLOCK], tl.float16))


def test_a_descriptor_comes_first(mapper: Mapper, through_triton: list) -> None:
    """What is stored by one."""
    y = torch.zeros(64, 64).half()
    for _ in range(3):
        described = TensorDescriptor(y, [64, 64], [64, 1], [64, 64])
        launches.launch(_fill_kernel, 1, described, 64)
    assert len(through_triton) == 2
    assert [made[0] for made in mapper.made] == [y.data_ptr()]


def test_descriptors(mapper: Mapper, through_triton: list) -> None:
    """From the third launch on as maps, one an address; other sizes are another launch."""
    y, xs = torch.zeros(64, 64).half(), [torch.zeros(64, 64).half() for _ in range(2)]
    for _ in range(2):
        copied(y, xs[0])
    assert len(through_triton) == 2
    assert not mapper.made
    for x in (xs[0], xs[1], xs[1], xs[0]):
        copied(y, x)
        number = 1 + (x is xs[1])
        assert mapper.maps == [[number, 5]]  # a small tensor's, of an old driver
        values = mapper.calls[-1][1]
        assert values[0] == y.data_ptr()
        assert values[2:] == [64, 64, 64, 1, 0, 0]
    assert len(through_triton) == 2
    (meta,) = through_triton[0][2].metadata.tensordesc_meta
    about = 6, [64, 64], [128], list(reversed(meta["block_size"])), [1, 1], (0, meta["swizzle"], 3, 0)  # fmt: skip
    assert mapper.made == [(x.data_ptr(), *about) for x in xs]
    copied(y, torch.zeros(64, 128).half()[:, :64])
    copied(y, xs[0], padding="nan")
    assert len(through_triton) == 4


@pytest.mark.parametrize(("version", "rows"), [(13020, 64), (13000, 4096)])
def test_maps_that_need_no_mending(mapper: Mapper, version: int, rows: int, monkeypatch) -> None:
    monkeypatch.setattr(Mapper, "VERSION", version)
    like = TensorDescriptor(torch.zeros(rows, 64).half(), [rows, 64], [64, 1], [64, 64])
    meta = dict(elem_size=2, elem_type=6, block_size=[64, 64], swizzle=3)
    made = tensor_map.TensorMaps(like, meta, mapper)[16]
    assert list((ctypes.c_uint64 * 2).from_buffer_copy(made)) == [1, 1 << 21 | 5]


@pytest.mark.parametrize(("columns", "promoted"), [(64, 3), (128, 2)])
def test_blocks_of_one_line_bring_the_next(mapper: Mapper, columns: int, promoted: int) -> None:
    like = TensorDescriptor(torch.zeros(64, 128).half(), [64, 128], [128, 1], [64, columns])
    meta = dict(elem_size=2, elem_type=6, block_size=[64, 64], swizzle=3)
    assert tensor_map.TensorMaps(like, meta, mapper)[16]
    assert mapper.made[0][-1][2] == promoted


def test_maps_that_the_driver_refuses(mapper: Mapper) -> None:
    like = TensorDescriptor(torch.zeros(64, 64).half(), [64, 64], [64, 1], [64, 64])
    meta = dict(elem_size=2, elem_type=6, block_size=[64, 64], swizzle=3)
    mapper.cuTensorMapEncodeTiled = lambda *_: 1
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        tensor_map.TensorMaps(like, meta, mapper)[16]


def test_a_thread_without_a_context_gets_one_for_its_maps(mapper: Mapper) -> None:
    like = TensorDescriptor(torch.zeros(64, 64).half(), [64, 64], [64, 1], [64, 64])
    meta = dict(elem_size=2, elem_type=6, block_size=[64, 64], swizzle=3)
    calls, encode = [], mapper.cuTensorMapEncodeTiled
    mapper.cuTensorMapEncodeTiled = lambda *a: encode(*a) if "set" in calls else 201
    for name, call in (
        ("DeviceGet", "get"),
        ("DevicePrimaryCtxRetain", "retain"),
        ("CtxSetCurrent", "set"),
    ):
        setattr(mapper, f"cu{name}", lambda *_, call=call: calls.append(call) or 0)
    assert tensor_map.TensorMaps(like, meta, mapper, 1)[16]
    assert calls == ["get", "retain", "set"]
    assert [made[0] for made in mapper.made] == [16]


def test_descriptors_without_maps_are_tritons_to_launch(driver: Driver, through_triton: list) -> None:  # fmt: skip
    """A driver that makes none."""
    x, y = torch.zeros(64, 64).half(), torch.zeros(64, 64).half()
    for _ in range(4):
        copied(y, x)
    assert len(through_triton) == 4
    assert not driver.calls


def test_what_only_triton_can_launch(driver: Driver, through_triton: list, monkeypatch) -> None:
    monkeypatch.setattr(driver_launch, "loaded", lambda: None)
    for _ in range(4):
        call_with(Pool(), "merge")
    assert len(through_triton) == 4
