"""The doctor on GPUs, shared memory and containers, by message."""

from __future__ import annotations

import pytest

from tests.doctor.machines import (
    SMI,
    cpu_machine,
    gpu_machine,
    one,
)
from torch_fdattn.doctor import gpus, host
from torch_fdattn.doctor import machine as machine_module
from torch_fdattn.doctor.machine import Gpu


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
    assert found.remedy == "start the container with --gpus all if the host has GPUs"


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
