"""The doctor on versions, the interpreter, kernels and extras, by message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doctor.machines import (
    cpu_machine,
    gpu_machine,
    one,
)
from tests.tables.records import read_from, record, save
from torch_fdattn import doctor
from torch_fdattn.doctor import software
from torch_fdattn.doctor.machine import Gpu, inspect
from torch_fdattn.doctor.remedies import remedy_for
from torch_fdattn.environment import interpreting


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("2.11.0a0+git1", (2, 11, 0)), ("3.6", (3, 6)), ("nightly", ())],
)
def test_release(version, numbers):
    assert software.release(version) == numbers


@pytest.mark.parametrize(
    ("changes", "text", "remedy"),
    [
        ({"torch": "2.10.1"}, "2.10.1 is too old (supported: >= 2.11)", "torch>=2.11"),
        ({"triton": "3.5.1"}, "3.5.1 is too old (supported: >= 3.6)", "triton>=3.6"),
        ({"python": "3.10.18"}, "3.10.18 is too old (supported: >= 3.11)", "newer Python"),
        (
            {"torch": "", "unread": {"torch": "ImportError: libcudart.so.13"}},
            "does not import: ImportError: libcudart.so.13",
            "torch>=2.11",
        ),
    ],
)
def test_unsupported_versions_fail(changes, text, remedy):
    found = one(software.check_versions(cpu_machine(**changes), {}), "fail", text)
    assert remedy in found.remedy


def test_versions_at_the_lower_bound_are_supported():
    found = software.check_versions(
        cpu_machine(torch="2.11.0", triton="3.6.0", python="3.11.0"), {}
    )
    assert not [finding for finding in found if finding.level != "ok"]


def test_versions_that_were_not_tested_yet_are_a_note():
    found = software.check_versions(cpu_machine(torch="2.14.1+cpu", triton="3.8.0"), {})
    one(found, "note", "2.14.1+cpu (supported: >= 2.11), newer than the newest tested, 2.13.0")
    one(found, "note", "3.8.0 (supported: >= 3.6), newer than the newest tested, 3.7.1")
    one(software.check_versions(cpu_machine(torch="2.13.1"), {}), "ok", "2.13.1 (supported")
    pinned = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    assert all(f"{name}=={version}" in pinned for name, version in software.NEWEST_TESTED.items())


def test_missing_triton_is_a_note_on_cpu_and_a_failure_with_gpus():
    text = "not installed: CPU tensors only"
    one(software.check_versions(cpu_machine(triton=None), {}), "note", text)
    one(software.check_versions(gpu_machine(triton=None), {}), "fail", text)


def test_triton_that_does_not_import_says_why():
    broken = {"triton": None, "unread": {"triton": "ImportError: libtriton.so"}}
    text = "does not import: ImportError: libtriton.so"
    one(software.check_versions(cpu_machine(**broken), {}), "warn", text)
    one(software.check_versions(gpu_machine(**broken), {}), "fail", text)


@pytest.mark.parametrize(
    ("triton", "numpy", "env", "level"),
    [
        ("3.6.0", "2.4.0", {}, "note"),
        ("3.6.0", "2.5.2", {"TRITON_INTERPRET": "1"}, "fail"),
        ("3.6.0", "2.3.5", {"TRITON_INTERPRET": "1"}, None),
        ("3.7.1", "2.4.6", {"TRITON_INTERPRET": "1"}, None),
        ("3.6.0", None, {"TRITON_INTERPRET": "1"}, None),
    ],
)
def test_interpreter_trap(triton, numpy, env, level):
    found = software.check_versions(cpu_machine(triton=triton, numpy=numpy), env)
    trap = [finding for finding in found if "only 0-dimensional arrays" in finding.text]
    assert [finding.level for finding in trap] == ([level] if level else [])


INTERPRET = ["1", "0", "true", "True", "ON", "on", "yes", "y", "off", "no", "2", "t", "", " 1"]


@pytest.mark.parametrize("value", INTERPRET)
def test_the_interpreter_is_asked_for_as_triton_reads_it(value, monkeypatch):
    triton = pytest.importorskip("triton", reason="triton is the reference here")
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert interpreting(os.environ) == triton.knobs.runtime.interpret


def test_the_library_reads_it_alike():
    code = "from torch_fdattn.ops.library import INTERPRET; print(INTERPRET)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "on"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"


def test_driver_too_old_for_the_cuda_runtime():
    machine = gpu_machine(gpus=[], smi=[("Tesla V100", "535.104.05")])
    text = "driver 535.104.05 is too old for CUDA 13.0 (needs >= 580)"
    assert (
        "update the NVIDIA driver" in one(software.check_versions(machine, {}), "fail", text).remedy
    )
    # Forward compatibility: torch sees the GPU all the same.
    machine = gpu_machine(1, smi=[("Tesla V100", "535.104.05")])
    one(software.check_versions(machine, {}), "note", text)
    machine = gpu_machine(1, smi=[("NVIDIA GPU", "[N/A]")])
    one(software.check_versions(machine, {}), "ok", "CUDA 13.0, driver [N/A]")


def test_runtime_and_backends_are_named():
    found = software.check_versions(gpu_machine(), {})
    one(found, "ok", "CUDA 13.0, driver 580.65.06")
    one(found, "ok", "NCCL 2.28.9, gloo yes")
    one(software.check_versions(cpu_machine(hip="7.0"), {}), "ok", "ROCm 7.0")
    found = software.check_versions(cpu_machine(gloo=False), {})
    one(found, "note", "NCCL not in this torch, gloo no")


@pytest.mark.parametrize(
    ("machine", "env", "level", "text"),
    [
        (cpu_machine(), {}, "ok", "CPU tensors: torch's flash kernel; the reference in plain"),
        (cpu_machine(), {"TORCH_FDATTN_REFERENCE": "1"}, "note", "the reference for all calls"),
        (gpu_machine(), {}, "ok", "CUDA tensors: portable Triton kernels"),
        (gpu_machine(triton=None), {}, "fail", "CUDA tensors: none, because triton is missing"),
        (cpu_machine(), {"TRITON_INTERPRET": "1"}, "note", "CPU tensors: the Triton kernels, int"),
        (gpu_machine(), {"TRITON_INTERPRET": "1"}, "warn", "CUDA tensors: the Triton kernels, int"),
        (cpu_machine(triton=None), {"TRITON_INTERPRET": "1"}, "fail", "triton is not installed"),
        (gpu_machine(hip="7.0"), {}, "note", "ROCm tensors: portable Triton kernels"),
        (gpu_machine(gpus=[Gpu("T4", (7, 5), 15.0)]), {}, "warn", "untested on sm_75"),
    ],
)
def test_which_kernels_run(machine, env, level, text):
    one(software.check_kernels(machine, env), level, text)


def test_extras():
    found = software.check_extras(cpu_machine(missing={"models": ["gguf", "jinja2"], "cli": []}))
    one(found, "ok", "complete: cli, serve, transformers, bench")
    missing = one(found, "note", "models: missing gguf, jinja2")
    assert missing.remedy == "pip install -e '.[models]' in torch_fdattn's checkout"


@pytest.mark.parametrize(
    ("result", "level", "text"),
    [
        (
            {"errors": {"cpu": 4e-7, "cuda:0": 6e-4}},
            "ok",
            "right (largest errors: cpu 4e-07, cuda:0",
        ),
        ({"errors": {"cpu": 4e-7, "cuda:0": 0.5}}, "fail", "wrong on cuda:0"),
        ({"errors": {"cpu": float("nan")}}, "fail", "wrong on cpu"),
        ({"error": "no result within 120 s"}, "fail", "on cpu, cuda:0 failed: no result within"),
    ],
)
def test_kernel_trials(result, level, text):
    one(doctor.judge_kernels(result, ["cpu", "cuda:0"]), level, text)


def test_a_failed_device_does_not_hide_the_others():
    result = {"errors": {"cpu": 4e-7}, "failed": {"cuda:0": "CUDA error: no kernel image is ..."}}
    found = doctor.judge_kernels(result, ["cpu", "cuda:0"])
    one(found, "ok", "cpu 4e-07")
    assert "install a torch wheel" in one(found, "fail", "on cuda:0 failed: CUDA error").remedy


@pytest.mark.parametrize(
    ("error", "part"),
    [
        ("CUDA error: no kernel image is available for execution", "has no code for this GPU"),
        ("CUDA error: an illegal memory access was encountered", "CUDA_LAUNCH_BLOCKING=1"),
        ("The NVIDIA driver on your system is too old", "update the NVIDIA driver"),
        ("Error while creating shared memory segment /dev/shm/nccl-x", "--ipc=host"),
        ("EADDRINUSE: address already in use", "MASTER_PORT"),
        ("Duplicate GPU detected : rank 0 and rank 1", "one process per GPU"),
        ("Failed to find C compiler", "install gcc"),
        ("something new", "as given"),
    ],
)
def test_remedies(error, part):
    assert part in remedy_for(error, "as given")


class TestTunedTable:
    GPU = "NVIDIA H100 80GB HBM3"

    def test_none_is_nothing_to_say(self):
        assert software.check_table(gpu_machine()) == []

    def test_it_speaks_for_the_gpus_here_or_not(self):
        one(software.check_table(gpu_machine(table="t.json", tuned=[self.GPU])), "ok", f"t.json: {self.GPU}")  # fmt: skip
        found = one(software.check_table(gpu_machine(table="t.json", tuned=["another"])), "note", f"t.json has no record of {self.GPU} with triton 3.7.1")  # fmt: skip
        assert found.remedy == "fdattn tune"
        one(software.check_table(cpu_machine(table="t.json")), "ok", "no GPU here asks it")

    def test_it_is_read(self, tmp_path):
        path = save(tmp_path / "tables.json", record(gpu="A"), record(gpu="B", triton="1.0"))
        with read_from(path):
            machine = inspect()
            assert (machine.table, machine.tuned) == (str(path), ["A"])
            path.write_text("{")
            assert "is no JSON" in inspect().unread["the tuned table"]
        with read_from(tmp_path / "none.json"):
            assert "no such file" in inspect().unread["the tuned table"]
