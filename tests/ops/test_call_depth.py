"""How many of our files a repeated eager call runs through, from the op's call to the driver's.

A GPU is stood in for: Triton compiles nothing, and the driver's own call does nothing. All between them is as it is
there. A kind of call is bound at its second call; what is counted is the calls after it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torch_fdattn

if torch_fdattn.ops.library.INTERPRET:
    pytest.skip("compiles kernels, which the interpreter replaces", allow_module_level=True)

from torch_fdattn.launch import driver_launch, launches, prepared
from torch_fdattn.ops import library
from torch_fdattn.ops.attention import backward, dispatch, forward
from torch_fdattn.ops.decode import launch as decode_launch

PACKAGE = Path(torch_fdattn.__file__).parent
OPS = torch.ops.fdattn


def files_called(call: Callable[[], object]) -> set[str]:
    """The package's files of which a function runs in a call."""
    paths = set()

    def note(frame, event, _) -> None:
        if event == "call":
            paths.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    own = (Path(path) for path in paths if path.startswith(f"{PACKAGE}/"))
    return {str(path.relative_to(PACKAGE)) for path in own}


def _kind(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    return "*u8" if isinstance(value, torch.Tensor) else "constexpr"


def _pointers(kinds) -> int:
    return sum(_pointers(x) if isinstance(x, tuple) else x == "*u8" for x in kinds)


def _compiled(launch: launches.Launch) -> types.SimpleNamespace:
    """What Triton would return, of a kernel whose numbers are all constants."""
    kinds = [_kind(x) for x in launch._bound()]
    parameters = [".param .u64 x"] * (_pointers(kinds) + len(driver_launch._HIDDEN))
    metadata = types.SimpleNamespace(
        num_warps=4, num_ctas=1, shared=0, launch_pdl=False, launch_cooperative_grid=False,
        global_scratch_size=0, profile_scratch_size=0,
    )  # fmt: skip
    return types.SimpleNamespace(
        src=types.SimpleNamespace(signature=dict(enumerate(kinds))), metadata=metadata, function=1,
        asm={"ptx": f".entry kernel({', '.join(parameters)})"},
    )  # fmt: skip


@pytest.fixture
def by_driver(monkeypatch):
    """The grids that the driver launches, on tensors that pass for a GPU's."""
    grids = []

    def launch(config, *_) -> int:
        grids.append(tuple(config.contents.grid))
        return 0

    driver = types.SimpleNamespace(cuLaunchKernelEx=launch, cuFuncSetAttribute=lambda *_: 0)
    memory = types.SimpleNamespace(
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472
    )
    for target, name, value in (
        (driver_launch, "loaded", lambda: driver), (launches, "on_gpu", lambda _: True),
        (launches.Launch, "through_triton", _compiled), (torch.Tensor, "is_cuda", True),
        (torch.cuda, "get_device_properties", lambda _: memory), (library, "use_triton", lambda _: True),
        (dispatch, "choose", lambda *_: "triton"),
        *((module, "device_capability", lambda _: (9, 0)) for module in (forward, backward, decode_launch)),
    ):  # fmt: skip
        monkeypatch.setattr(target, name, value)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    prepared.forget()
    yield grids
    prepared.forget()


Q, KEYS = torch.zeros(2, 4, 1, 64, dtype=torch.bfloat16), torch.zeros(2, 2, 2048, 64, dtype=torch.bfloat16)  # fmt: skip
PAGES, MORE_PAGES = torch.zeros(2, 64, 2, 64, 64, dtype=torch.bfloat16)
TABLE = torch.zeros(2, 20, dtype=torch.int32)
VALUES = KEYS.clone()
LENS, ROWS = torch.tensor([2048, 5], dtype=torch.int32), torch.zeros(2, 4, 64, 64, dtype=torch.bfloat16)  # fmt: skip
#: Calls, how many files each may run through, and its launches.
CALLS = {
    "decode": (lambda: OPS.decode(Q, KEYS, VALUES, LENS), 4, 2),
    "decode, Python entry": (lambda: torch_fdattn.decode(Q, KEYS, VALUES, LENS), 5, 2),
    "paged_decode": (lambda: OPS.paged_decode(Q, PAGES, MORE_PAGES, TABLE, LENS), 4, 2),
    "attention, Python entry": (
        lambda: torch_fdattn.attention(ROWS, KEYS, VALUES, causal=True), 7, 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_files_of_a_repeated_call(name: str, by_driver: list) -> None:
    call, most, count = CALLS[name]
    with torch.no_grad():
        for _ in range(2):
            call()
        assert not by_driver
        files = files_called(call)
    assert len(by_driver) == count
    assert len(files) <= most, sorted(files)
    assert "launch/driver_launch.py" in files
