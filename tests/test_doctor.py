"""The doctor's judgements on machines and environments that this machine is not, by message."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from torch_fdattn import doctor
from torch_fdattn.doctor import gpus, host, ranks, software, torchrun, trial
from torch_fdattn.doctor import machine as machine_module
from torch_fdattn.doctor.findings import WIDTH, Finding, as_json, lines, screen
from torch_fdattn.doctor.machine import Gpu, Machine
from torch_fdattn.doctor.remedies import remedy_for
from torch_fdattn.environment import interpreting

SMI = [("NVIDIA H100 80GB HBM3", "580.65.06"), ("NVIDIA H100 80GB HBM3", "580.65.06")]
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
REACHABLE = torchrun.Network(
    resolve=lambda name, port: ["127.0.0.1"],
    connect=lambda name, port: None,
    listen=lambda port: None,
    is_local=lambda address: True,
)


def cpu_machine(**changes):
    facts = {
        "python": "3.11.7",
        "system": "Linux",
        "torch": "2.13.0+cpu",
        "triton": "3.7.1",
        "numpy": "2.3.0",
        "gloo": True,
        "shm": (8 << 30, 8 << 30),
    }
    return Machine(**{**facts, **changes})


def gpu_machine(count=2, **changes):
    facts = {
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "arches": ["sm_80", "sm_90", "sm_100", "compute_120"],
        "nccl": "2.28.9",
        "gpus": [Gpu("NVIDIA H100 80GB HBM3", (9, 0), 79.2, f"GPU-{i}") for i in range(count)],
        "peers": [[True] * count] * count if count > 1 else [],
        "smi": SMI[:1] * count,
    }
    return cpu_machine(**{**facts, **changes})


def one(findings, level, part):
    """The one finding of that level whose text holds `part`."""
    found = [finding for finding in findings if part in finding.text]
    assert len(found) == 1, f"{part!r} found {len(found)} times in {findings}"
    assert found[0].level == level, found[0]
    return found[0]


def launch_of(changes, network=REACHABLE):
    env = {**TORCHRUN, **changes}
    return torchrun.check_launch({k: v for k, v in env.items() if v is not None}, network)


# Versions


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


def test_missing_triton_is_a_note_on_cpu_and_a_failure_with_gpus():
    text = "not installed: CPU reference only"
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


@pytest.mark.parametrize("digits", ["²", "٢", "1" * 5000])
def test_odd_digits_are_no_numbers(digits):
    assert doctor._rank({"RANK": digits}) == 0
    _, found = torchrun.check_launch({"OMPI_COMM_WORLD_SIZE": digits}, REACHABLE)
    one(found, "ok", "not used: one process")
    found = gpus.check_gpus(gpu_machine(1, smi=SMI), {"CUDA_VISIBLE_DEVICES": digits})
    one(found, "ok", "1 of 2 GPU(s) visible")


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


# GPUs


def test_equal_gpus_share_a_line():
    found = gpus.check_gpus(gpu_machine(8), {})
    one(found, "ok", "cuda:0-7: NVIDIA H100 80GB HBM3, sm_90, 79 GiB")
    mixed = gpu_machine(2)
    mixed.gpus[1] = Gpu("NVIDIA A100", (8, 0), 40.0)
    found = gpus.check_gpus(mixed, {})
    one(found, "ok", "cuda:0: NVIDIA H100")
    one(found, "ok", "cuda:1: NVIDIA A100, sm_80, 40 GiB")


@pytest.mark.parametrize("value", ["", " ", "-1"])
def test_hidden_gpus(value):
    env = {"CUDA_VISIBLE_DEVICES": value}
    text = f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU"
    found = one(gpus.check_gpus(gpu_machine(gpus=[], smi=SMI), env), "warn", text)
    assert found.remedy == "unset CUDA_VISIBLE_DEVICES to use them"
    one(gpus.check_gpus(gpu_machine(gpus=[], smi=None), env), "note", text)
    hip = cpu_machine(hip="7.0")
    text = f"HIP_VISIBLE_DEVICES={value!r} hides every GPU"
    one(gpus.check_gpus(hip, {"HIP_VISIBLE_DEVICES": value}), "note", text)


def test_cpu_build_of_torch_beside_gpus():
    found = one(gpus.check_gpus(cpu_machine(smi=SMI), {}), "warn", "is a CPU build")
    assert "nvidia-smi sees 2 GPU(s), but this torch (2.13.0+cpu)" in found.text
    assert "CUDA build" in found.remedy


def test_torch_that_cannot_use_the_gpus_says_why():
    error = "The NVIDIA driver on your system is too old (found version 11040)."
    machine = gpu_machine(gpus=[], smi=SMI, cuda_error=error)
    found = one(gpus.check_gpus(machine, {}), "fail", "but torch cannot use them")
    assert error in found.text
    assert "update the NVIDIA driver" in found.remedy


def test_failing_nvidia_smi():
    machine = gpu_machine(gpus=[], smi=[], smi_error="couldn't communicate with the NVIDIA driver")
    one(gpus.check_gpus(machine, {}), "fail", "couldn't communicate with the NVIDIA driver")


def test_no_gpu_at_all():
    one(gpus.check_gpus(cpu_machine(), {}), "note", "none found, and torch is a CPU build")
    machine = gpu_machine(gpus=[], smi=None, container="/.dockerenv")
    found = one(gpus.check_gpus(machine, {}), "note", "none found: everything runs on the CPU")
    assert "--gpus all" in found.remedy


def test_visible_devices_that_are_not_there():
    env = {"CUDA_VISIBLE_DEVICES": "0,7"}
    found = one(gpus.check_gpus(gpu_machine(1, smi=SMI), env), "warn", "names 7")
    assert "this machine has GPUs 0 to 1: CUDA ignores the list from there on" in found.text
    found = gpus.check_gpus(gpu_machine(1, smi=SMI), {"CUDA_VISIBLE_DEVICES": "1"})
    one(found, "ok", "CUDA_VISIBLE_DEVICES='1': 1 of 2 GPU(s) visible")


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("compute_80", (9, 0), True),
        ("compute_120", (9, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100f", (10, 3), True),
        ("compute_100a", (12, 0), False),
        ("unknown", (9, 0), True),
    ],
)
def test_which_code_runs_where(arch, capability, runs):
    machine = gpu_machine(1, arches=[arch])
    machine.gpus[0] = Gpu("a GPU", capability, 80.0)
    failed = [finding for finding in gpus.check_gpus(machine, {}) if finding.level == "fail"]
    assert bool(failed) is not runs
    assert all("no kernel image is available" in finding.text for finding in failed)


def test_local_rank_without_a_gpu():
    text = "LOCAL_RANK 2 has no GPU: this process sees 2 (cuda:0 to cuda:1)"
    one(gpus.check_local_rank(gpu_machine(2), 2), "fail", text)
    assert gpus.check_local_rank(gpu_machine(2), 1) == []
    assert gpus.check_local_rank(cpu_machine(), 5) == []


def test_peers():
    assert gpus.check_peers(gpu_machine(1)) == []
    one(gpus.check_peers(gpu_machine(4)), "ok", "direct access between all 4 GPUs (12 pairs)")
    machine = gpu_machine(2, peers=[[True, False], [True, True]])
    one(gpus.check_peers(machine), "note", "no direct access in 1 of 2 pairs (0->1)")


def test_multicast_is_reported_and_left_alone():
    env = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    before = dict(env)
    found = one(gpus.check_multicast(gpu_machine(), env), "ok", "switched off by")
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST=1, NCCL_NVLS_ENABLE=0" in found.text
    assert env == before
    found = gpus.check_multicast(gpu_machine(), {"NCCL_NVLS_ENABLE": "1"})
    one(found, "note", "not switched off; not tried")
    assert gpus.check_multicast(gpu_machine(1), env) == []


# The host


def test_shared_memory():
    small = cpu_machine(shm=(64 << 20, 60 << 20))
    found = one(host.check_shared_memory(small, 2), "warn", "/dev/shm has 64 MiB, 60 MiB free")
    assert found.remedy.startswith("docker run --ipc=host, or --shm-size=8g")
    one(host.check_shared_memory(small, 1), "note", "too little for several processes")
    one(host.check_shared_memory(gpu_machine(shm=(1, 1)), 1), "warn", "too little")
    one(host.check_shared_memory(cpu_machine(), 2), "ok", "/dev/shm has 8.0 GiB, 8.0 GiB free")
    one(host.check_shared_memory(cpu_machine(shm=None), 2), "note", "there is no /dev/shm")
    assert host.check_shared_memory(cpu_machine(shm=None, system="Darwin"), 2) == []


@pytest.mark.parametrize(
    ("files", "sign"),
    [
        ({"/.dockerenv": ""}, "/.dockerenv"),
        ({"/run/.containerenv": ""}, "/run/.containerenv"),
        ({"/proc/1/cgroup": "0::/kubepods/besteffort"}, "kubepods in /proc/1/cgroup"),
        ({"/proc/1/cgroup": "0::/init.scope"}, ""),
        ({}, ""),
    ],
)
def test_container_signs(files, sign):
    assert machine_module.container_sign(files.get) == sign
    text = f"yes ({sign})" if sign else "no sign of one"
    one(host.check_container(cpu_machine(container=sign)), "ok", text)


# Kernels and extras


@pytest.mark.parametrize(
    ("machine", "env", "level", "text"),
    [
        (cpu_machine(), {}, "ok", "CPU tensors: the reference in plain PyTorch"),
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
    one(found, "ok", "complete: cli, bench")
    missing = one(found, "note", "models: missing gguf, jinja2")
    assert missing.remedy == "pip install 'torch-fdattn[models]'"


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


# torchrun's variables


def test_no_launcher():
    launch, found = torchrun.check_launch({}, REACHABLE)
    assert launch is None
    one(found, "ok", "not used: one process")
    _, found = torchrun.check_launch({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, REACHABLE)
    one(found, "note", "MASTER_ADDR and MASTER_PORT set, but RANK and WORLD_SIZE are not")
    _, found = torchrun.check_launch({"OMPI_COMM_WORLD_SIZE": "4"}, REACHABLE)
    assert "torchrun" in one(found, "warn", "mpirun started 4 processes, but RANK").remedy


def test_consistent_variables():
    launch, found = launch_of({"RANK": "1", "LOCAL_RANK": "1"})
    assert (launch.rank, launch.world, launch.host, launch.port) == (1, 2, "127.0.0.1", 29500)
    one(found, "ok", "RANK 1 of WORLD_SIZE 2, LOCAL_RANK 1 of 2, master 127.0.0.1:29500")
    one(found, "ok", "127.0.0.1:29500 answers")
    launch, _ = launch_of({"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None, "RANK": "1"})
    assert (launch.local_rank, launch.local_world) == (1, 2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number, got 'two'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be at least 1, got 0"),
        ({"WORLD_SIZE": "²"}, "WORLD_SIZE must be a whole number, got '²'"),
        ({"WORLD_SIZE": "٢"}, "WORLD_SIZE must be a whole number, got '٢'"),
        ({"WORLD_SIZE": "1" * 5000}, "WORLD_SIZE must be a whole number, got '1111"),
        ({"RANK": "2.0"}, "RANK must be a whole number, got '2.0'"),
        ({"RANK": "2"}, "RANK must be in [0, WORLD_SIZE) = [0, 2), got 2"),
        ({"RANK": "-1"}, "RANK must be in [0, WORLD_SIZE) = [0, 2), got -1"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK must be in [0, LOCAL_WORLD_SIZE) = [0, 2), got 2"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE must be in [1, WORLD_SIZE] = [1, 2], got 3"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be a whole number, got 'http'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must be in [1, 65535], got 70000"),
        ({"MASTER_ADDR": "node1:29500"}, "a host name or an IP address alone, got 'node1:29500'"),
        ({"MASTER_ADDR": None}, "not set: MASTER_ADDR; but set: RANK, WORLD_SIZE, MASTER_PORT"),
        ({"RANK": None}, "not set: RANK; but set: WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": ""}, "not set: WORLD_SIZE; but set: RANK, MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_wrong_variables(changes, text):
    launch, found = launch_of(changes)
    assert launch is None
    assert one(found, "fail", text).remedy


def test_every_wrong_variable_is_named():
    _, found = launch_of({"WORLD_SIZE": "two", "MASTER_PORT": "x", "MASTER_ADDR": None})
    assert len(found) == 3


def test_loopback_master_with_several_machines():
    launch, found = launch_of({"WORLD_SIZE": "4", "MASTER_ADDR": "localhost"})
    assert launch.world == 4
    one(found, "warn", "WORLD_SIZE 4 > LOCAL_WORLD_SIZE 2: processes on other machines cannot")


def raising(error):
    def probe(*_, **__):
        raise error

    return probe


def test_unresolvable_master():
    error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    network = replace(REACHABLE, resolve=raising(error))
    launch, found = launch_of({"MASTER_ADDR": "nowhere"}, network)
    assert launch is None
    text = "MASTER_ADDR 'nowhere' cannot be resolved: Name or service not known"
    assert "/etc/hosts" in one(found, "fail", text).remedy


def test_closed_port():
    refused = ConnectionRefusedError(111, "Connection refused")
    network = replace(REACHABLE, connect=raising(refused))
    launch, found = launch_of({}, network)
    assert launch is None
    one(found, "fail", "nothing answers at 127.0.0.1:29500 (127.0.0.1): Connection refused")
    # Without torchrun rank 0 opens the port only when it comes that far.
    launch, found = launch_of({"TORCHELASTIC_USE_AGENT_STORE": None, "RANK": "1"}, network)
    assert launch is not None
    assert "start rank 0 too" in one(found, "warn", "nothing answers at").remedy


def test_port_taken_where_rank_0_must_listen():
    network = torchrun.real_network()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        changes = {"TORCHELASTIC_USE_AGENT_STORE": None, "MASTER_PORT": str(port)}
        launch, found = launch_of(changes, network)
        assert launch is None
        text = f"rank 0 must listen on MASTER_PORT {port}, but cannot: address already in use"
        assert "another MASTER_PORT" in one(found, "fail", text).remedy
    launch, found = launch_of(changes, network)
    assert launch is not None
    one(found, "ok", f"port {port} is free for rank 0 to listen on")


def test_rank_0_away_from_the_master_address():
    changes = {"TORCHELASTIC_USE_AGENT_STORE": None, "MASTER_ADDR": "203.0.113.7"}
    network = replace(torchrun.real_network(), listen=lambda port: None)
    launch, found = launch_of(changes, network)
    assert launch is not None
    text = "MASTER_ADDR 203.0.113.7 (203.0.113.7) is not this machine, but rank 0 is here"
    assert "start rank 0 on MASTER_ADDR" in one(found, "warn", text).remedy
    assert network.is_local("127.0.0.1")


def test_real_probes_are_bounded(monkeypatch):
    monkeypatch.setattr(torchrun, "PROBE_SECONDS", 0.4)
    network = torchrun.real_network()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        network.connect("127.0.0.1", port)
    assert network.resolve("127.0.0.1", port) == ["127.0.0.1"]
    start = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        network.connect("127.0.0.1", port)
    with pytest.raises((socket.gaierror, TimeoutError)):
        network.resolve("no-such-host.invalid", port)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(1) or [])
    with pytest.raises(TimeoutError, match="no answer within"):
        network.resolve("slow", port)
    assert time.monotonic() - start < 10  # on a busy machine, too


# Ranks compared


def card(rank=0, **changes):
    versions = {"torch": "2.11.0", "triton": "3.6.0", "NCCL": "2.28.9"}
    gpu = {"device": f"cuda:{rank}", "gpu": f"GPU-{rank}"}
    return {"host": "node1", "nccl": "2.28.9", "versions": versions, **gpu, **changes}


def test_equal_ranks():
    one(ranks.compare({0: card(0), 1: card(1)}), "ok", "all 2 ranks met, on 1 machine(s)")


def test_ranks_that_do_not_fit_together():
    other = {"torch": "2.13.0", "triton": "3.6.0", "NCCL": "2.28.9"}
    found = ranks.compare({0: card(0), 1: card(1, versions=other)})
    one(found, "warn", "torch differs between ranks: 2.11.0 on rank 0; 2.13.0 on rank 1")
    found = ranks.compare({0: card(0), 1: card(0)})
    assert "one process per GPU" in one(found, "fail", "ranks 0 and 1 use one and the same").remedy
    found = ranks.compare({0: card(0), 1: card(1, gpu="", device="cpu")})
    one(found, "fail", "rank 1 sees no GPU, but others do (1 of 2)")
    found = ranks.compare({0: card(0), 1: card(0, host="node2")})
    assert [finding.level for finding in found] == ["ok"]


def test_own_card_stays_within_the_visible_gpus():
    launch = torchrun.TorchrunLaunch(1, 2, 1, 2, "127.0.0.1", 29500, True)
    assert ranks.own_card(gpu_machine(2), launch)["device"] == "cuda:1"
    assert ranks.own_card(gpu_machine(1), launch)["device"] == "cuda:0"
    assert ranks.own_card(cpu_machine(), launch)["device"] == "cpu"


# Trials in processes of their own


def test_a_trial_that_raises_hangs_or_dies_is_reported(tmp_path, monkeypatch):
    assert "KeyError" in trial.run("no such trial", {}, 60)["error"]
    assert "no result within 0 s; the trial was ended" in trial.run("kernels", {}, 0.01)["error"]
    (tmp_path / "sitecustomize.py").write_text("import os; os.abort()")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "the trial's process ended with status -6" in trial.run("kernels", {}, 60)["error"]
    monkeypatch.setattr("sys.executable", str(tmp_path / "nothing"))
    assert "could not be started" in trial.run("kernels", {}, 60)["error"]


# Probes and the screen


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
    one(found, "ok", "CPU tensors: the reference")


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
