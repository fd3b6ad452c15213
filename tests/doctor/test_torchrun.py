"""The doctor on torchrun's variables, the master's address and port, and ranks compared, by message."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

import pytest

from tests.doctor.machines import (
    REACHABLE,
    SMI,
    cpu_machine,
    gpu_machine,
    launch_of,
    one,
    raising,
)
from torch_fdattn import doctor
from torch_fdattn.doctor import gpus, ranks, torchrun


@pytest.mark.parametrize("digits", ["²", "٢", "1" * 5000])
def test_odd_digits_are_no_numbers(digits):
    assert doctor._rank({"RANK": digits}) == 0
    _, found = torchrun.check_launch({"OMPI_COMM_WORLD_SIZE": digits}, REACHABLE)
    one(found, "ok", "not used: one process")
    found = gpus.check_gpus(gpu_machine(1, smi=SMI), {"CUDA_VISIBLE_DEVICES": digits})
    one(found, "ok", "1 of 2 GPU(s) visible")


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
