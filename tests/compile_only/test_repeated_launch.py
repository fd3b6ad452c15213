"""What a repeated launch hands to the driver, against what Triton would have bound for the same tensors."""

import ctypes
import os
import types
from unittest import mock

import numpy as np
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
from torch_fdattn.dist.tp_linear import push_values, row_norm
from torch_fdattn.ops import (
    direct_launch,
    library,
    repeated_call,
    repeated_launch,
    row_ranges,
    tensor_map,
)
from torch_fdattn.ops.append_kv.arguments import Append
from torch_fdattn.ops.append_kv.kernel import launch_append
from torch_fdattn.ops.attention import backward as attention_backward
from torch_fdattn.ops.attention import forward as attention_forward
from torch_fdattn.ops.attention import op as attention_op
from torch_fdattn.ops.attention.backward import launch_backward
from torch_fdattn.ops.attention.configs import BackwardConfig, TileConfig
from torch_fdattn.ops.attention.dropout import Dropout
from torch_fdattn.ops.attention.forward import launch_forward
from torch_fdattn.ops.direct_launch import flat
from torch_fdattn.ops.merge_states.kernel import launch_merge
from torch_fdattn.ops.packed import Packed, by_heads
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.repeated_call import metadata, repeat
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
    init = direct_launch.DirectLaunch.__init__

    def noted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        driver.layouts[self._function.value] = self.layout

    monkeypatch.setattr(direct_launch.DirectLaunch, "__init__", noted)
    monkeypatch.setattr(direct_launch, "loaded", lambda: driver)
    monkeypatch.setattr(repeated_launch, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    repeated_launch.forget()
    yield driver
    repeated_launch.forget()


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
                src=made.src, metadata=made.metadata, function=len(compiled) + 1
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
    launch_forward(q, k, v, Mask(lens, None, lens, 9, 0), 0.5, out, lse, scores, dropout, TILE)


def pages() -> None:
    q, lens = by_heads(draw(40, 4, 32)), draw(3, dtype=torch.int32)
    k, v = (draw(20, 2, 16, 32) for _ in range(2))
    out, lse = by_heads(draw(40, 4, 32)), draw(4, 40, dtype=torch.float32)
    packed = Packed(draw(4, dtype=torch.int32), None, draw(3, 6, dtype=torch.int32))
    launch_forward(q, k, v, Mask(lens, window_right=0), 0.5, out, lse, config=TILE, packed=packed)


def backward(case: str) -> None:
    q, out, dout, dq = (draw(2, 4, 64, 32) for _ in range(4))
    k, v, dk, dv = (draw(2, 2, 64, 32) for _ in range(4))
    lse, dlse = (draw(2, 4, 64, dtype=torch.float32) for _ in range(2))
    scores = wanted = Scores()
    if case == "gradients":
        slopes, bias = draw(4, dtype=torch.float32), draw(4, 64, 64)
        scores = Scores(alibi_slopes=slopes, attn_mask=bias)
        wanted = Scores(
            alibi_slopes=draw(*slopes.shape, dtype=torch.float32), attn_mask=draw(4, 64, 64)
        )
    launch_backward(
        dout, dlse if case == "plain" else None, q, k, v, out, lse, Mask(window_right=0), 0.5, dq, dk, dv, scores,
        wanted, config=BackwardConfig(TILE, TILE),
    )  # fmt: skip


def packed_backward() -> None:
    q, out, dout, dq = (by_heads(draw(96, 4, 32)) for _ in range(4))
    k, v, dk, dv = (by_heads(draw(80, 2, 32)) for _ in range(4))
    lse, slopes = draw(4, 96, dtype=torch.float32), draw(3, 4, dtype=torch.float32)
    begins = Packed(*(draw(4, dtype=torch.int32) for _ in range(2)))
    scores, wanted = (
        Scores(alibi_slopes=x) for x in (slopes, draw(*slopes.shape, dtype=torch.float32))
    )
    launch_backward(
        dout, None, q, k, v, out, lse, Mask(), 0.5, dq, dk, dv, scores, wanted, config=BackwardConfig(TILE, TILE),
        packed=begins,
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
    repeated_launch.forget()
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
        patch.setattr(repeated_launch, "somebody_watches", lambda: True)
        assert goes_through_triton(outs, lses, out, lse)
    assert not goes_through_triton(outs, lses, out, lse)
    monkeypatch.setattr(repeated_launch, "MOST", len(repeated_launch._known))
    assert goes_through_triton(outs[:1], lses[:1], out, lse)
    assert len(repeated_launch._known) == 1


def test_a_call_of_one_launch(driver: Driver, through_triton: list, monkeypatch) -> None:
    """The fourth goes past its checks; not where anything that decides it differs, nor where it is watched."""
    runs, outs, lses = [], torch.zeros(3, 2, 4, 5, 32), torch.zeros(3, 2, 4, 5)

    def skips(outs, lses, out=None) -> bool:
        out, lse = torch.zeros(2, 4, 5, 32) if out is None else out, torch.zeros(2, 4, 5)

        def run() -> None:
            runs.append(out)
            launch_merge(outs, lses, out, lse)

        before, launched = len(runs), len(driver.calls) + len(through_triton)
        key = "merge", *metadata(outs, lses, out, lse)
        repeat(key, (outs, lses, out, lse), run, "a counter")
        assert len(driver.calls) + len(through_triton) == launched + 1
        if skipped := len(runs) == before:
            values = driver.calls[-1][1]
            assert [x.data_ptr() for x in (outs, lses, out, lse)] == values[:4]
        return skipped

    library.launches.pop("a counter", None)
    assert [skips(outs, lses) for _ in range(5)] == [False, False, False, True, True]
    assert library.launches["a counter"] == 2
    assert skips(outs.clone(), lses.clone())
    assert not skips(outs[:2], lses[:2])
    shifted = torch.zeros(1290)[2:1282].view(2, 4, 5, 32)
    assert not skips(outs, lses, shifted)
    with monkeypatch.context() as patch:
        patch.setattr(direct_launch, "somebody_watches", lambda: True)
        assert not skips(outs, lses)
    with monkeypatch.context() as patch:
        patch.setattr(checks, "CHECK_VALUES", True)
        assert not skips(outs, lses)
    assert skips(outs, lses)
    repeated_launch.forget()
    assert not skips(outs, lses)


def test_calls_that_are_not_what_was_named(driver: Driver, through_triton: list) -> None:
    """A launch with a tensor that was not named, or where two are one: always run."""
    outs, lses = torch.zeros(3, 2, 4, 5, 32), torch.zeros(3, 2, 4, 5)
    out, lse, runs = torch.zeros(2, 4, 5, 32), torch.zeros(2, 4, 5), []
    merge = lambda: runs.append(launch_merge(outs, lses, out, lse))  # noqa: E731
    for _ in range(6):
        repeat(("others",), (outs, lses, out), merge)
        repeat(("one twice",), (outs, lses, out, lse, lse), merge)
        repeat(("none",), (outs, lses, out, lse), lambda: runs.append(None))
    assert len(runs) == 18


def test_a_call_within_a_call(driver: Driver, through_triton: list) -> None:
    """The inner one is repeated; of the outer one one would know the launches beside it alone."""
    tensors = torch.zeros(3, 2, 4, 5, 32), torch.zeros(3, 2, 4, 5), torch.zeros(2, 4, 5, 32), torch.zeros(2, 4, 5)  # fmt: skip
    runs = []

    def merge(name: str) -> None:
        runs.append(name)
        launch_merge(*tensors)

    def outer() -> None:
        merge("outer")
        repeat(("inner",), tensors, lambda: merge("inner"))

    for _ in range(8):
        repeat(("outer",), tensors, outer)
    assert runs.count("outer") == 8
    assert runs.count("inner") < 4
    assert len(driver.calls) + len(through_triton) == 16


def test_a_call_of_two_launches(driver: Driver, through_triton: list) -> None:
    """Each is repeated with its own tensors, in whatever order they were named."""
    runs = []

    def call() -> tuple[bool, list[int]]:
        parts = [(torch.zeros(n, 2, 4, 5, 32), torch.zeros(n, 2, 4, 5)) for n in (3, 2)]
        outs, lses = [torch.zeros(2, 4, 5, 32) for _ in parts], [torch.zeros(2, 4, 5) for _ in parts]  # fmt: skip
        taken = [(*part, out, lse) for part, out, lse in zip(parts, outs, lses, strict=True)]

        def run() -> None:
            runs.append(None)
            for tensors in taken:
                launch_merge(*tensors)

        before = len(runs)
        repeat(("two",), (*lses, *outs, *parts[1], *parts[0]), run)
        expected = [[x.data_ptr() for x in tensors] for tensors in taken]
        found = [values[:4] for _, values in driver.calls[-2:]]
        assert len(runs) == 1 or len(driver.calls) < 2 or found == expected
        return len(runs) == before

    assert [call() for _ in range(5)] == [False, False, False, True, True]


def of_channels(monkeypatch, module) -> list[types.SimpleNamespace]:
    """The channels that the module's calls get, a new one each."""
    made = []

    def channel(*_) -> types.SimpleNamespace:
        addresses, state, fault = (torch.zeros(8, dtype=torch.int64) for _ in range(3))
        about = dict(memory=types.SimpleNamespace(addresses=addresses), state=state, rank=0)
        made.append(types.SimpleNamespace(**about, fault=types.SimpleNamespace(tensor=fault), half_bytes=1 << 16))  # fmt: skip
        return made[-1]

    monkeypatch.setattr(module, "channel_for", channel)
    return made


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather", "norm", "norm, bias"])
def test_exchanges_of_values(op: str, driver: Driver, through_triton: list, monkeypatch) -> None:
    """From the fourth on the driver is handed what Triton was: of these tensors, and of the channel as it is then."""
    module = row_norm if op.startswith("norm") else push_values
    made, kept, words = of_channels(monkeypatch, module), [], 512
    monkeypatch.setattr(row_norm, "rank_and_size", lambda _: (0, 2))

    def call(words: int = words) -> list[torch.Tensor]:
        """Its tensors, in the kernel's order."""

        def draw(rows: int) -> torch.Tensor:
            kept.append(torch.zeros(rows, 2 * words, dtype=torch.float16))
            return kept[-1]

        if module is row_norm:
            x, bias, residual, weight = draw(2), draw(1)[0] if "bias" in op else None, draw(2), draw(1)[0]  # fmt: skip
            kept.extend(row_norm.sum_norm(x, bias, residual, weight, 1e-6, "0"))
            return [x, *([] if bias is None else [bias]), residual, weight, *kept[-2:]]
        sizes = {"all_reduce": (1, 1), "reduce_scatter": (2, 1), "all_gather": (1, 2)}[op]
        x, y = map(draw, sizes)
        getattr(push_values, op)(x, y, "0", 0, 2)
        return [x, y]

    for i in range(6):
        if i == 3:
            monkeypatch.setattr(module, "launch", None)
        tensors = call()
        where = made[-1]
        tensors += [where.memory.addresses, where.state, where.fault.tensor]
        assert len(driver.calls) == max(0, i - 1)
        if driver.calls:
            grid, parameters = bound(*through_triton[1])
            addresses = [tensor.data_ptr() for tensor in tensors]
            numbers = parameters[len(addresses) :]
            assert driver.calls[-1] == (grid, [*addresses, *map(pytest.approx, numbers)])
    with pytest.raises(TypeError, match="not callable"):  # another number of words is another call
        call(256)


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
def test_copies_are_no_tensors_of_the_call(strided: str, packed: bool, on_a_gpu) -> None:
    """What a kernel takes in place of a strided tensor is not there when the call comes again."""
    op, lead = (varlen_op, ()) if packed else (attention_op, (2,))
    lens, where = draw(2, dtype=torch.int32), (draw(3, dtype=torch.int32), None) if packed else ()
    q = draw((96, 4, 32) if packed else (2, 4, 96, 32))
    rows = {"lse": draw((*lead, 4, 96), dtype=torch.float32), "dlse": draw((*lead, 4, 96), dtype=torch.float32)}  # fmt: skip
    rows[strided] = rows[strided].mT.contiguous().mT
    given = q, rows["dlse"], q.clone(), q.clone(), q.clone(), q.clone(), rows["lse"], *where
    rest = lens, None, None, -1, 0, 0, 0, 0.5, None
    for _ in range(4):
        op._backward(*given, *rest)
    assert not repeated_call._known


@pytest.mark.parametrize(("packed", "row"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_known_calls_of_attention(
    way: str, packed: bool, row: bool, driver: Driver, on_a_gpu, monkeypatch
) -> None:
    """Past its checks a raw op hands the driver what it does with them."""
    op = varlen_op if packed else attention_op
    checked = mock.Mock(wraps=op.check_inputs if op is attention_op else op._checked)
    monkeypatch.setattr(op, "check_inputs" if op is attention_op else "_checked", checked)

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
    monkeypatch.setattr(row_ranges, "LEAST_KEYS", 1)
    pool, launched = Pool(), {"forward": 1, "backward": 3}[way] + row
    for times in (1, 2, 3, 3, 3):  # how often it was checked: twice by Triton, once to learn
        call_with(pool, "attention")
        assert checked.call_count == times
    assert len(driver.calls) == 3 * launched
    assert driver.calls[:launched] == driver.calls[launched : 2 * launched]
    with monkeypatch.context() as patch:
        patch.setattr(attention_op.tuning.state, "active", True)
        patch.setattr(attention_op.tuning, "chosen", lambda op, config, *_: config)
        call_with(pool, "attention")
    assert checked.call_count == 4


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
    monkeypatch.setattr(direct_launch, "loaded", lambda: mapper)
    return mapper


def copied(y: torch.Tensor, x: torch.Tensor, **options) -> None:
    described = TensorDescriptor(x, [64, 64], [x.stride(0), 1], [64, 64], **options)
    repeated_launch.launch(_copy_kernel, 1, y, described, 64)


@triton.jit
def _fill_kernel(y, BLOCK: tl.constexpr):
    y.store([0, 0], tl.zeros([BLOCK, BLOCK], tl.float16))


def test_a_descriptor_comes_first(mapper: Mapper, through_triton: list) -> None:
    """What is stored by one."""
    y = torch.zeros(64, 64).half()
    for _ in range(3):
        described = TensorDescriptor(y, [64, 64], [64, 1], [64, 64])
        repeated_launch.launch(_fill_kernel, 1, described, 64)
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
        repeat(("copy",), (y, x), lambda x=x: copied(y, x))
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
    with pytest.raises(TypeError, match="unhashable"):
        repeated_launch.launch(_copy_kernel, 1, y, np.zeros(2), 64)


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


def test_an_option_without_a_hash(driver: Driver, through_triton: list) -> None:
    """NumPy's arrays of one number are numbers to the checks: run each time, in silence."""
    outs, lses = torch.zeros(3, 2, 4, 5, 32), torch.zeros(3, 2, 4, 5)
    out, lse, runs = torch.zeros(2, 4, 5, 32), torch.zeros(2, 4, 5), []
    for _ in range(5):
        merge = lambda: runs.append(launch_merge(outs, lses, out, lse))  # noqa: E731
        repeat(("merge", np.array(0.5)), (outs, lses, out, lse), merge)
    assert len(runs) == 5


def test_what_only_triton_can_launch(driver: Driver, through_triton: list, monkeypatch) -> None:
    monkeypatch.setattr(direct_launch, "loaded", lambda: None)
    for _ in range(4):
        call_with(Pool(), "merge")
    assert len(through_triton) == 4
