"""Tensor descriptors become tensor maps, one an address."""

import ctypes
import os

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels, which the interpreter replaces", allow_module_level=True)

from tests.compile_only.driver_calls import Driver
from torch_fdattn.launch import driver_launch, launches, tensor_map


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
