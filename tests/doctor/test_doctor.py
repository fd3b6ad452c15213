"""The doctor as a whole: trials in processes of their own, probes that fail, the screen, JSON, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.doctor.machines import (
    REACHABLE,
    SMI,
    TORCHRUN,
    cpu_machine,
    gpu_machine,
    one,
    raising,
)
from torch_fdattn import doctor
from torch_fdattn.doctor import machine as machine_module
from torch_fdattn.doctor import torchrun, trial
from torch_fdattn.doctor.findings import WIDTH, Finding, as_json, lines, screen


def test_a_trial_that_raises_hangs_or_dies_is_reported(tmp_path, monkeypatch):
    assert "KeyError" in trial.run("no such trial", {}, 60)["error"]
    assert "no result within 0 s; the trial was ended" in trial.run("kernels", {}, 0.01)["error"]
    (tmp_path / "sitecustomize.py").write_text("import os; os.abort()")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "the trial's process ended with status -6" in trial.run("kernels", {}, 60)["error"]
    monkeypatch.setattr("sys.executable", str(tmp_path / "nothing"))
    assert "could not be started" in trial.run("kernels", {}, 60)["error"]


def test_every_probe_may_fail(monkeypatch):
    broken = raising(OSError("planted"))
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("_triton_version", "_version", "_shm_size", "_missing_extras", "_read_file"):
        monkeypatch.setattr(machine_module, name, broken)
    monkeypatch.setattr(machine_module.shutil, "which", lambda _: "nvidia-smi")
    monkeypatch.setattr(subprocess, "run", raising(subprocess.TimeoutExpired("nvidia-smi", 10)))
    machine = machine_module.inspect()
    found = doctor.judge(machine, {})
    one(found, "fail", "does not import: ModuleNotFoundError: import of torch halted")
    one(found, "warn", "could not read nvidia-smi: TimeoutExpired")
    one(found, "warn", "could not read /dev/shm: OSError: planted")
    one(found, "warn", "could not read container: OSError: planted")
    # Nothing is said of what could not be read.
    topics = {finding.topic for finding in found}
    assert not topics & {"runtime", "backends", "gpu", "shm", "container", "extras"}


@pytest.mark.parametrize(
    ("code", "output", "smi", "error"),
    [
        (
            0,
            "NVIDIA H100, 580.65.06\nNVIDIA H100, 580.65.06\n",
            [("NVIDIA H100", "580.65.06")] * 2,
            "",
        ),
        (9, "NVIDIA-SMI has failed\n", [], "NVIDIA-SMI has failed"),
    ],
)
def test_nvidia_smi_is_read(monkeypatch, code, output, smi, error):
    done = SimpleNamespace(returncode=code, stdout=output, stderr="")
    monkeypatch.setattr(machine_module.shutil, "which", lambda _: "nvidia-smi")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    machine = machine_module.inspect()
    assert (machine.smi, machine.smi_error) == (smi, error)


def test_a_broken_check_is_a_finding(monkeypatch):
    monkeypatch.setattr(doctor.host, "check_container", raising(RuntimeError("planted")))
    found = doctor.judge(cpu_machine(), {})
    one(found, "warn", "a check failed: RuntimeError: planted")
    one(found, "ok", "CPU tensors: torch's flash kernel")


@pytest.mark.parametrize(
    ("machine", "env"),
    [
        (cpu_machine(missing={"models": ["gguf"], "cli": ["typer"], "bench": ["matplotlib"]}), {}),
        (gpu_machine(8), {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", **TORCHRUN}),
        (gpu_machine(gpus=[], smi=SMI, cuda_error="driver too old " * 20), {"RANK": "x" * 200}),
    ],
)
def test_screen_is_one_screen(machine, env):
    _, launch_findings = torchrun.check_launch(env, REACHABLE)
    shown = screen(doctor.judge(machine, env, None, launch_findings)).splitlines()
    assert len(shown) <= 40
    assert all(len(line) <= WIDTH for line in shown)


def test_lines_and_json():
    finding = Finding("fail", "gpu", "a text\nof two lines", "do this")
    assert lines(finding) == ["FAIL gpu         a text of two lines", " " * 17 + "fix: do this"]
    document = json.loads(as_json([finding]))
    assert document["usable"] is False
    assert document["findings"] == [
        {"level": "fail", "topic": "gpu", "text": "a text\nof two lines", "remedy": "do this"}
    ]
    with pytest.raises(ValueError, match="level must be one of"):
        Finding("bad", "gpu", "")


def test_main_on_this_machine(capsys, monkeypatch):
    for name in (*TORCHRUN, "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    assert doctor.main() == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("fdattn doctor: torch_fdattn is usable here")
    assert 14 <= len(shown) <= 40
    assert all(len(line) <= WIDTH for line in shown)
    assert dict(os.environ) == before


def test_main_with_wrong_variables(capsys, monkeypatch):
    for name, value in {**TORCHRUN, "WORLD_SIZE": "two"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor, "try_kernels", lambda *_: [])
    assert doctor.main(json=True) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["usable"] is False
    texts = [found["text"] for found in document["findings"] if found["level"] == "fail"]
    assert texts == ["WORLD_SIZE must be a whole number, got 'two'"]
    # Another rank speaks of its failures alone.
    monkeypatch.setenv("RANK", "1")
    assert doctor.main() == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["rank 1:", "FAIL torchrun    WORLD_SIZE must be a whole number, got 'two'"]
    assert not any(line.startswith("ok") for line in shown)
    assert doctor.main(json=True) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "FAIL torchrun" in shown.err
