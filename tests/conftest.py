"""Fixtures of all tests: the device, seeds, poisoned memory, marks, and the printed summary of draws.

One suite, three ways to run it:

    pytest                                     CPU: references; without a GPU, gpu tests skip
    TRITON_INTERPRET=1 pytest -m interpreter   CPU: the real kernels in Triton's interpreter
    pytest   (where there is a GPU)            the kernels on CUDA tensors
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch

from tests import fast_interpreter
from torch_fdattn.ops import determinism
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.testing import summarize


def _take_one_gpu() -> None:
    """Of those that there are, for a worker of pytest-xdist: the process that starts workers, whose environment they have,
    keeps all.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or os.environ.get("FDATTN_WORKERS_SHARE_GPUS") != "1":
        return
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    if len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker.removeprefix("gw")) % len(gpus)]


_take_one_gpu()
_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
#: A graph of an earlier test that is garbage is collected before a capture, in which destroying it is an error.
torch.compiler.config.force_cudagraph_gc = True
fast_interpreter.install()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("RANK", "0") != "0":
        config.option.xmlpath = None  # under torchrun rank 0 writes the report


#: Seeds of a drawn test that `make test` takes in the interpreter; those beyond are slow ones.
_QUICK_DRAWS = 4


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        seed = getattr(item, "callspec", None) and item.callspec.params.get("seed")
        if INTERPRET and item.name.startswith("test_drawn") and (seed or 0) >= _QUICK_DRAWS:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not _GPUS:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("multigpu") and _GPUS < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs 2 CUDA devices, found {_GPUS}"))


@pytest.fixture
def device() -> str:
    """Where tests put their tensors."""
    return "cuda" if _GPUS else "cpu"


@pytest.fixture
def kernel_device(device: str) -> str:
    """The device, where the Triton kernels can run: a GPU or the interpreter."""
    if device == "cpu" and not INTERPRET:
        pytest.skip("tests a kernel: needs a CUDA device or TRITON_INTERPRET=1")
    return device


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def poisoned_empty(monkeypatch) -> Iterator[None]:
    """torch.empty and its like hold NaN (or the largest integer) instead of what memory held."""
    monkeypatch.setattr(determinism, "asked_of_torch", lambda: False)
    deterministic = torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    # The filling is on only together with deterministic algorithms.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filling
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def record_drawn(record_property):
    """Called as record_drawn(op, features), it adds a drawn case to the summary."""

    def record(op: str, features: list[str]) -> None:
        record_property("drawn", [op, *features])

    return record


def pytest_terminal_summary(terminalreporter) -> None:
    drawn = defaultdict(list)
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "drawn" and report.when == "call":
                    drawn[value[0]].append(value[1:])
    if drawn:
        terminalreporter.section("drawn cases")
    for op, features in sorted(drawn.items()):
        terminalreporter.write_line(f"{op}: {summarize(features)}")
