"""The arguments of a direct launch, as the driver would read them, against the compiled kernel's own list."""

import ctypes
import os
import re
import subprocess
import tempfile
import types
from pathlib import Path

import pytest
import torch
import triton

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels, which the interpreter replaces", allow_module_level=True)

from tests.compile_only.compiled import compile_launch
from tests.compile_only.launches import Case, record
from tests.compile_only.targets import ARCHS
from torch_fdattn.launch import driver_launch
from torch_fdattn.launch.driver import copy_async
from torch_fdattn.launch.driver_launch import _WIDTHS, DriverLaunch, parameter_sizes

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
CASES = [
    Case("decode", "sm_90", "bf16", 128, mask, 4, cache)
    for mask, cache in (("padded", "same"), ("all", "same-paged"), ("sharded", "e4m3"), ("full", "int8-paged"))
]  # fmt: skip


def sizes_in_cubin(cubin: bytes) -> list[int]:
    """Bytes of each parameter of the one kernel in a cubin, in order."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [CUOBJDUMP, "-elf", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.findall(r"Ordinal : (0x\w+)\s+Offset  : 0x\w+\s+Size    : (0x\w+)", text)
    return [size for _, size in sorted((int(at, 16), int(size, 16)) for at, size in found)]


def launches(case: Case):
    for launch in record(case):
        compiled = compile_launch(launch, ARCHS[case.arch])
        yield (
            launch,
            types.SimpleNamespace(
                src=compiled.src, metadata=compiled.metadata, function=77, asm=compiled.asm
            ),
        )


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=pytest.mark.slow if x in CASES[1:3] else ()) for x in CASES],
    ids=str,
)
def test_what_the_driver_reads(case: Case) -> None:
    for launch, compiled in launches(case):
        seen = []

        def driver(config, function, parameters, extra, seen=seen, compiled=compiled):
            assert function.value == 77
            assert extra is None
            config = config.contents
            assert (list(config.grid), list(config.block)) == (
                [3, 2, 1],
                [32 * compiled.metadata.num_warps, 1, 1],
            )
            assert (config.shared, config.stream) == (compiled.metadata.shared, 4096)
            assert config.count == int(compiled.metadata.launch_pdl)
            seen.extend(parameters)
            return 0

        direct = DriverLaunch(
            compiled, (3, 2, 1), launch.args, types.SimpleNamespace(cuLaunchKernelEx=driver)
        )
        sizes = [ctypes.sizeof(kind) for kind in direct.layout]
        assert sizes == sizes_in_cubin(compiled.asm["cubin"])
        assert direct.matches(compiled.asm["ptx"])
        tensors = sum(kind.startswith("*") for kind in _kinds(compiled.src.signature.values()))
        addresses = [2**40 + 16 * i for i in range(tensors)]
        direct(4096, addresses)
        seen = [kind.from_address(at).value for at, kind in zip(seen, direct.layout, strict=True)]
        assert seen[:tensors] == addresses
        numbers = [x for x in _numbers(compiled.src.signature.values(), launch.args)]
        assert seen[tensors:-2] == pytest.approx(numbers)
        assert seen[-2:] == [0, 0]


def test_a_refused_launch_is_an_error() -> None:
    launch, compiled = next(launches(CASES[0]))
    direct = DriverLaunch(
        compiled, (1, 1, 1), launch.args, types.SimpleNamespace(cuLaunchKernelEx=lambda *_: 701)
    )
    count = sum(kind.startswith("*") for kind in _kinds(compiled.src.signature.values()))
    with pytest.raises(RuntimeError, match="CUDA error 701"):
        direct(0, [0] * count)
    with pytest.raises(ValueError, match="same size"):
        direct(0, [0] * (count - 1))


def test_a_thread_without_a_context_gets_one() -> None:
    """As a new thread's first CUDA call: the launch says 201, the primary context is bound, and it goes again."""
    launch, compiled = next(launches(CASES[0]))
    calls, results = [], [201, 0]

    def named(name, result=None):
        def call(*_):
            calls.append(name)
            return results.pop(0) if result is None else result

        return call

    driver = types.SimpleNamespace(
        cuLaunchKernelEx=named("launch"), cuDeviceGet=named("device", 0),
        cuDevicePrimaryCtxRetain=named("retain", 0), cuCtxSetCurrent=named("set", 0),
    )  # fmt: skip
    direct = DriverLaunch(compiled, (1, 1, 1), launch.args, driver)
    count = sum(kind.startswith("*") for kind in _kinds(compiled.src.signature.values()))
    direct(0, [0] * count)
    assert calls == ["launch", "device", "retain", "set", "launch"]
    results[:] = [201, 201]
    with pytest.raises(RuntimeError, match="CUDA error 201"):
        direct(0, [0] * count)
    driver.cuCtxSetCurrent = named("set", 3)
    results[:] = [201]
    with pytest.raises(RuntimeError, match="no CUDA context for device 0: CUDA error 3"):
        direct(0, [0] * count)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parameters_are_those_of_the_cubin(case: Case) -> None:
    for _, compiled in launches(case):
        assert parameter_sizes(compiled.asm["ptx"]) == sizes_in_cubin(compiled.asm["cubin"])


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (".visible .entry _a_kernel(\n\t.param .u64 .ptr .global .align 1 _a_kernel_param_0\n)\n{", [8]),
        (
            ".entry b(.param .align 64 .b8 b_param_0[128], .param .u16 b_param_1, .param .f32 b_param_2, "
            ".param .f64 b_param_3, .param .u8 b_param_4)",
            [128, 2, 4, 8, 1],
        ),
        (".entry c(.param .u64 c_param_0, .param .unheard c_param_1)", [8, 0]),
        (".entry d()", []),
        ("no kernel", []),
    ],
)  # fmt: skip
def test_parameters_in_ptx(text: str, sizes: list[int]) -> None:
    assert parameter_sizes(text) == sizes


@pytest.mark.parametrize("change", ["none", "one more", "one fewer", "a wider one"])
def test_parameters_that_are_not_known_are_left_to_triton(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a version of Triton would bring them: asked of the compiled kernel, not of the version's number."""
    launch, compiled = next(launches(CASES[0]))
    ptx, last = compiled.asm["ptx"], ".param .u64 .ptr .global .align 1 _decode_kernel_param_"
    count = len(parameter_sizes(ptx))
    end = f"{last}{count - 1}\n"
    changed = {
        "none": end, "one more": f"{end[:-1]},\n\t{last}{count}\n", "one fewer": "",
        "a wider one": end.replace(".u64 .ptr .global .align 1", ".align 64 .b8")[:-1] + "[128]\n",
    }[change]  # fmt: skip
    assert end in ptx
    compiled.asm = {"ptx": ptx.replace(end, changed)}
    driver = types.SimpleNamespace(cuLaunchKernelEx=None)
    monkeypatch.setattr(driver_launch, "loaded", lambda: driver)
    device = torch.device("cuda", 0)
    made = driver_launch.driver_launch(compiled, (1, 1, 1), launch.args, device)
    assert (made is not None) == (change == "none")


@pytest.mark.parametrize("total", [233472, 167936, 102400])
@pytest.mark.parametrize("beside", [1, 2, 3, 4])
def test_shared_memory_that_leaves_no_room_for_more(beside: int, total: int) -> None:
    taken = driver_launch.shared_to_limit(beside, total) + 1024
    assert beside * taken <= total < (beside + 1) * taken


@pytest.mark.parametrize("refused", [False, True])
def test_programs_side_by_side(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, compiled = next(launches(CASES[0]))
    compiled.metadata = types.SimpleNamespace(
        **compiled.metadata._asdict() | dict(global_scratch_size=0, profile_scratch_size=0)
    )
    calls = []

    def set_attribute(function, attribute, value):
        calls.append((function.value, attribute, value))
        return 1 if refused else 0

    driver = types.SimpleNamespace(cuLaunchKernelEx=None, cuFuncSetAttribute=set_attribute)
    monkeypatch.setattr(driver_launch, "loaded", lambda: driver)
    properties = types.SimpleNamespace(
        shared_memory_per_multiprocessor=233472, shared_memory_per_block_optin=232448
    )
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)

    def shared(beside):
        device = torch.device("cuda", 0)
        made = driver_launch.driver_launch(compiled, (1, 1, 1), launch.args, device, beside)
        return made._config.shared

    own = compiled.metadata.shared
    assert own < driver_launch.shared_to_limit(2, 233472)
    assert (shared(None), shared(40)) == (own, own)  # 40: fewer fit by themselves
    assert not calls
    assert shared(2) == (own if refused else driver_launch.shared_to_limit(2, 233472))
    assert calls == [(77, 8, 232448)]


def _kinds(kinds):
    for kind in kinds:
        yield from _kinds(kind) if isinstance(kind, tuple) else [kind]


def _numbers(kinds, values):
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from _numbers(kind, value)
        elif kind in _WIDTHS:
            yield value


def test_copies_by_the_driver() -> None:
    calls, results = [], [201, 0, 1]

    def copy(*given):
        calls.append(given)
        return results.pop(0)

    bind = lambda *_: calls.append("bind") or 0  # noqa: E731
    driver = types.SimpleNamespace(
        cuMemcpyAsync=copy, cuDeviceGet=bind, cuDevicePrimaryCtxRetain=lambda *_: 0, cuCtxSetCurrent=lambda *_: 0
    )  # fmt: skip
    copy_async(driver, 64, 32, 16, 5, 0)
    assert calls == [(64, 32, 16, 5), "bind", (64, 32, 16, 5)]
    with pytest.raises(RuntimeError, match="cuMemcpyAsync failed with CUDA error 1"):
        copy_async(driver, 64, 32, 16, 5, 0)
