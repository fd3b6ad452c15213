"""The fixtures of prepared launches: the driver that notes them, and Triton, which compiles instead."""

import types
from unittest import mock

import pytest
import torch
from triton.runtime.jit import JITFunction

from tests.compile_only.compiled import compile_launch
from tests.compile_only.driver_calls import Driver
from tests.compile_only.launches import Launch
from tests.compile_only.targets import ARCHS
from torch_fdattn.launch import driver_launch, launches, prepared


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
