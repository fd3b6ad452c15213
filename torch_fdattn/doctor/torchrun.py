"""torchrun's variables: set, readable, consistent, and a master that can be reached.

The checks take the environment and the network's probes as arguments; nothing waits longer than
PROBE_SECONDS.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch_fdattn.environment import parse_integer

from .findings import Finding

PROBE_SECONDS = 3.0
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_START = "start with torchrun --nproc-per-node N -m torch_fdattn ..., which sets all of them"
# Launchers that start several processes without setting torch's variables.
_FOREIGN = {"OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun", "SLURM_STEP_NUM_TASKS": "srun"}


@dataclass(frozen=True)
class TorchrunLaunch:
    """What the variables say once they are readable and consistent."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    host: str
    port: int
    agent_store: bool  # torchrun's agent listens on the port; otherwise rank 0 will
    restart: str = "0"


@dataclass(frozen=True)
class Network:
    """The probes, replaceable in tests. Each raises OSError (TimeoutError is one) or returns."""

    resolve: Callable[[str, int], list[str]]
    connect: Callable[[str, int], None]
    listen: Callable[[int], None]
    is_local: Callable[[str], bool]


def check_launch(
    env: Mapping[str, str], network: Network
) -> tuple[TorchrunLaunch | None, list[Finding]]:
    """The launch, or None where there is none or it cannot work; and what was found."""
    present = [name for name in _NEEDED if env.get(name)]
    if not {"RANK", "WORLD_SIZE"} & set(present):
        return None, [_alone(env, present)]
    launch, wrong = _read(env)
    if launch is None:
        return None, [_fail(text, remedy) for text, remedy in wrong]
    found = [_summary(launch)]
    if launch.world > launch.local_world and _is_loopback(launch.host):
        text = (
            f"MASTER_ADDR={launch.host} is this machine itself, but WORLD_SIZE {launch.world} > "
            f"LOCAL_WORLD_SIZE {launch.local_world}: processes on other machines cannot reach it"
        )
        found.append(Finding("warn", "torchrun", text, "set MASTER_ADDR to rank 0's address"))
    unreachable = _reach(launch, network)
    if any(finding.level == "fail" for finding in unreachable):
        return None, found + unreachable
    return launch, found + unreachable


def real_network() -> Network:
    return Network(_resolve, connect, _listen, _is_local)


def _alone(env: Mapping[str, str], present: list[str]) -> Finding:
    for name, launcher in _FOREIGN.items():
        if (parse_integer(env.get(name, "")) or 1) > 1:
            text = f"{launcher} started {env[name]} processes, but RANK and WORLD_SIZE are not set"
            text += ": each works alone"
            remedy = "use torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each"
            return Finding("warn", "torchrun", text, remedy)
    if present:
        text = f"{' and '.join(present)} set, but RANK and WORLD_SIZE are not: works alone"
        return Finding("note", "torchrun", text)
    return Finding("ok", "torchrun", "not used: one process")


def _read(env: Mapping[str, str]) -> tuple[TorchrunLaunch | None, list[tuple[str, str]]]:
    """The launch, or None and what is wrong as (text, remedy)."""
    wrong = []
    missing = [name for name in _NEEDED if not env.get(name)]
    if missing:
        there = [name for name in _NEEDED if name not in missing]
        text = f"not set: {', '.join(missing)}; but set: {', '.join(there)}"
        wrong.append((text, _START))
    numbers = {}
    for name in _NUMBERS:
        if (number := parse_integer(env.get(name, ""))) is not None:
            numbers[name] = number
        elif env.get(name):
            wrong.append((f"{name} must be a whole number, got {env[name]!r}", _START))
    wrong += _out_of_range(numbers)
    host = env.get("MASTER_ADDR", "")
    if host and not _is_host(host):
        text = f"MASTER_ADDR must be a host name or an IP address alone, got {host!r}"
        wrong.append((text, "the port goes into MASTER_PORT, and no http:// stands before it"))
    if wrong:
        return None, wrong
    rank, world = numbers["RANK"], numbers["WORLD_SIZE"]
    launch = TorchrunLaunch(
        rank,
        world,
        # Without torchrun often unset: then all processes are taken to be on one machine.
        numbers.get("LOCAL_RANK", rank),
        numbers.get("LOCAL_WORLD_SIZE", world),
        host,
        numbers["MASTER_PORT"],
        env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        env.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )
    return launch, []


def _out_of_range(numbers: Mapping[str, int]) -> list[tuple[str, str]]:
    wrong = []
    for name, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if name in numbers and size in numbers and not 0 <= numbers[name] < max(1, numbers[size]):
            bound = f"[0, {size}) = [0, {numbers[size]})"
            text = f"{name} must be in {bound}, got {numbers[name]}"
            wrong.append((text, f"give each process its own {name}, counted from 0"))
    world, local_world = numbers.get("WORLD_SIZE", 1), numbers.get("LOCAL_WORLD_SIZE", 1)
    if world < 1:
        wrong.append((f"WORLD_SIZE must be at least 1, got {world}", _START))
    elif not 1 <= local_world <= world and "WORLD_SIZE" in numbers:
        text = f"LOCAL_WORLD_SIZE must be in [1, WORLD_SIZE] = [1, {world}], got {local_world}"
        wrong.append((text, _START))
    port = numbers.get("MASTER_PORT", 1)
    if not 1 <= port <= 65535:
        text = f"MASTER_PORT must be in [1, 65535], got {port}"
        wrong.append((text, "choose a free port, such as 29500"))
    return wrong


def _summary(launch: TorchrunLaunch) -> Finding:
    text = (
        f"RANK {launch.rank} of WORLD_SIZE {launch.world}, LOCAL_RANK {launch.local_rank} of "
        f"{launch.local_world}, master {launch.host}:{launch.port}"
    )
    return Finding("ok", "torchrun", text)


def _reach(launch: TorchrunLaunch, network: Network) -> list[Finding]:
    where = f"{launch.host}:{launch.port}"
    try:
        addresses = network.resolve(launch.host, launch.port)
    except OSError as error:
        text = f"MASTER_ADDR {launch.host!r} cannot be resolved: {_reason(error)}"
        return [_fail(text, "use an IP address, or mend DNS or /etc/hosts on this machine")]
    if not launch.agent_store and launch.rank == 0:
        try:
            network.listen(launch.port)
        except OSError as error:
            text = f"rank 0 must listen on MASTER_PORT {launch.port}, but cannot: {_reason(error)}"
            remedy = "end the job that holds the port, or choose another MASTER_PORT for all ranks"
            return [_fail(text, remedy)]
        if not any(network.is_local(address) for address in addresses):
            text = f"MASTER_ADDR {launch.host} ({', '.join(addresses)}) is not this machine, but "
            text += "rank 0 is here, and the others will look for it there"
            remedy = "start rank 0 on MASTER_ADDR, or set MASTER_ADDR to this machine's address"
            return [Finding("warn", "master", text, remedy)]
        return [Finding("ok", "master", f"port {launch.port} is free for rank 0 to listen on")]
    try:
        network.connect(launch.host, launch.port)
    except OSError as error:
        text = f"nothing answers at {where} ({', '.join(addresses)}): {_reason(error)}"
        if launch.agent_store:
            remedy = "check MASTER_ADDR and MASTER_PORT, and that no firewall closes the port"
            return [_fail(text, remedy)]
        # Without torchrun rank 0 opens the port itself, perhaps in a moment: not yet a failure.
        return [Finding("warn", "master", text, "start rank 0 too, on MASTER_ADDR")]
    return [Finding("ok", "master", f"{where} answers")]


def _fail(text: str, remedy: str) -> Finding:
    return Finding("fail", "torchrun", text, remedy)


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
        return True
    except ValueError:
        return not any(sign in host for sign in ":/ ,")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _resolve(host: str, port: int) -> list[str]:
    """getaddrinfo has no time-out of its own, so it runs in a thread that may be left behind."""
    answer: list[object] = []

    def ask() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answer.append(sorted({str(info[4][0]) for info in infos}))
        except (OSError, UnicodeError) as error:
            answer.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    if not answer:
        raise TimeoutError(f"no answer within {PROBE_SECONDS:.0f} s")
    if isinstance(answer[0], list):
        return answer[0]
    raise answer[0] if isinstance(answer[0], OSError) else OSError(str(answer[0]))


def connect(host: str, port: int, seconds: float | None = None) -> None:
    """Tries for so many seconds (PROBE_SECONDS): the other side may be starting at this moment."""
    seconds = PROBE_SECONDS if seconds is None else seconds
    deadline = time.monotonic() + seconds
    while True:
        try:
            left = max(0.1, deadline - time.monotonic())
            socket.create_connection((host, port), timeout=left).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() + 0.2 > deadline:
                raise
            time.sleep(0.2)
        except TimeoutError:
            raise TimeoutError(f"no answer within {seconds:.0f} s") from None


def _is_local(address: str) -> bool:
    """Whether the address is one of this machine's: only to such a one can a socket be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def _listen(port: int) -> None:
    """Whether this process could listen on the port, on all addresses as torch's store does."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except PermissionError:
            raise
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise OSError(error.errno, "address already in use") from None
            raise
