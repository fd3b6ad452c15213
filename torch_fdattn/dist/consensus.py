"""What must be equal on all ranks: compared before data moves, and named on every rank where it differs."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from torch_fdattn import checks
from torch_fdattn.dist.groups import backends_of, is_traced
from torch_fdattn.dist.symm.faults import PeerTimeout, raise_faults, timeout_ns

_MAX_REMEMBERED = 4096  # kinds of call that are remembered of a group
#: Digests of what this rank has compared.
_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, Tensor]] = (
    weakref.WeakKeyDictionary()
)
#: What all ranks answered, by what was asked; None where they differed.
_consensus: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, str | None]] = (
    weakref.WeakKeyDictionary()
)
#: Groups in which this rank left a call by an exception where the others may wait for it: which call, None once they have
#: come to the next one; and how many it left so.
_left: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[str | None, int]] = (
    weakref.WeakKeyDictionary()
)
_assumed = threading.local()
_REFUSED = "what a rank refuses"
#: What a rank may refuse by; a subclass travels as the first of them that it is.
_REFUSALS = {x.__name__: x for x in (TypeError, ValueError, NotImplementedError, IndexError)}
_log = logging.getLogger("torch_fdattn")
_MAX_SHOWN = 16  # numbers of a tensor that an error shows


def wants_gradients(*tensors: Tensor) -> dict[str, object]:
    """For `check_equal_on_all_ranks`: a backward that is a collective must run on all ranks or on none."""
    needed = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return {"whether gradients are wanted": needed}


@contextlib.contextmanager
def assume_equal_on_all_ranks() -> Iterator[None]:
    """Inside it CPUs too skip the comparison of values that this rank has compared before: for steps that follow from
    what all ranks have compared, as a model's next token does.
    """
    outside = getattr(_assumed, "active", False)
    _assumed.active = True
    try:
        yield
    finally:
        _assumed.active = outside


def equality_is_assumed() -> bool:
    """Whether this is inside `assume_equal_on_all_ranks`."""
    return getattr(_assumed, "active", False)


def check_equal_on_all_ranks(
    group_name: str, like: Tensor, values: Mapping[str, object], once: bool = False,
    contents: Mapping[str, Tensor | None] | None = None,
) -> None:  # fmt: skip
    """Compares what must be equal on all ranks, before any data moves.

    contents: tensors whose numbers must be equal too. They are read whenever `values` are compared, and never tell one
    call from another: on GPUs those of the first call with such values are compared, and no later ones.

    CPU tensors: 8 bytes a rank in every call (but see `assume_equal_on_all_ranks`), unless `once` is set: for
    exchanges that do not use the group's collectives and find a dead rank themselves. On other devices a small
    collective, and a wait for the device, the first time that this rank sees these values, and nothing later (with
    TORCH_FDATTN_CHECK=1 every time). What happens where ranks differ while one of them has seen its values earlier
    is undefined (a time-out, an error of the backend, or wrong numbers). Nothing is compared in traces and CUDA graphs.

    Raises:
        ValueError: on every rank, naming the value and what each rank has.
    """
    if is_traced(like) or (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    group = distributed_c10d._resolve_process_group(group_name)
    compared = _compared.setdefault(group, {})
    key = tuple(values.items())
    digest = compared.get(key)
    if _left.get(group, (None, 0))[0] is not None:
        raise_faults(group_name)
        _await_after_leaving(group, group_name)
    on_cpu = like.device.type == "cpu"
    every_time = checks.CHECK_VALUES or (on_cpu and not (once or equality_is_assumed()))
    if digest is not None and not every_time:
        return
    raise_faults(group_name)  # a dead rank would not come to the comparison
    if contents:
        values = {**values, **{name: numbers_of(x) for name, x in contents.items()}}
        digest = _digest(tuple(values.items()))
    elif digest is None:
        digest = _digest(key)
    if not (on_cpu and _digests_are_equal(group, digest)):
        _compare(group, values)
    if _REFUSED in values:  # as on all ranks; told again where one rank alone refuses it
        return
    if len(compared) >= _MAX_REMEMBERED:  # on all ranks at once: all have compared the same values
        compared.clear()
    compared[key] = digest


def numbers_of(x: Tensor | None) -> str | None:
    """A tensor's numbers for `check_equal_on_all_ranks`: as they are where they are few, else 64 bits of them.

    A tensor of a GPU is waited for.
    """
    if x is None:
        return None
    x = x.detach().cpu().contiguous()
    if x.numel() <= _MAX_SHOWN:
        return str(x.tolist())
    digest = hashlib.blake2b(x.view(-1).view(torch.uint8).numpy(), digest_size=8).hexdigest()
    return f"{x.dtype} {tuple(x.shape)} of digest {digest}"


def refuse_on_all_ranks(group_name: str, like: Tensor, message: str) -> NoReturn:
    """Raises NotImplementedError; ranks that come to `check_equal_on_all_ranks` of the same call raise it as well."""
    tell_refusal(group_name, like, error := NotImplementedError(message))
    raise error


@contextlib.contextmanager
def leaving_by_exceptions(group_name: str, call: str) -> Iterator[Callable[[], None]]:
    """A part of a call that the other ranks wait for, without a collective of the group; what it gives is to be called once they
    have all from this rank.

    After an exception in it they time out, and come to no call; or they had one as well, and come. So this rank's next
    call waits for them to say so, on any device, and no longer than they wait: its data would meet that of the call it left.
    """
    is_waited_for = [True]
    try:
        yield is_waited_for.clear
    except BaseException:
        if is_waited_for:
            group = distributed_c10d._resolve_process_group(group_name)
            _left[group] = call, _left.get(group, (None, 0))[1] + 1
        raise


@contextlib.contextmanager
def refusing_on_all_ranks(group_name: str, like: Tensor) -> Iterator[None]:
    """What is refused inside it, before `check_equal_on_all_ranks` of the same call, the other ranks raise there as well,
    by the same type.
    """
    try:
        yield
    except tuple(_REFUSALS.values()) as error:
        tell_refusal(group_name, like, error)
        raise


def tell_refusal(group_name: str, like: Tensor, error: Exception, once: bool = False) -> None:
    """The other ranks raise what this one is about to raise, where they come to `check_equal_on_all_ranks` of this call.

    once: they may come to none, for they compare new calls alone; they are told only if no call was compared yet.
    On devices other than CPUs they may have compared this call before and come to none either, and this rank then waits until
    the collective times out: so what it refuses is logged before it waits.
    """
    if is_traced(like):
        return
    group = distributed_c10d._resolve_process_group(group_name)
    if once and not checks.CHECK_VALUES and _compared.get(group):
        return
    kind = next(name for name, kind in _REFUSALS.items() if isinstance(error, kind))
    if like.device.type != "cpu":
        _log.error("rank %d refuses a call: %s: %s", dist.get_rank(group), kind, error)
    with contextlib.suppress(*_REFUSALS.values()):
        check_equal_on_all_ranks(group_name, like, {_REFUSED: (kind, str(error))})


def largest_on_all_ranks(
    group_name: str, device: torch.device, numbers: Sequence[int]
) -> list[int]:
    """Of each number, as many on every rank, the largest that a rank has: a collective on this device, and a wait for it."""
    group = distributed_c10d._resolve_process_group(group_name)
    raise_faults(group_name)
    largest = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest.tolist()


def raise_on_all_ranks(
    group_name: str, device: torch.device, kind: type[Exception], said: str | None, remedy: str
) -> None:
    """Raises `kind` on every rank where one of them has something to say (None: nothing), with what each one says.

    A collective of one number on this device, and a wait for it.
    """
    if not largest_on_all_ranks(group_name, device, [said is not None])[0]:
        return
    texts = enumerate(_gather(distributed_c10d._resolve_process_group(group_name), said))
    ranks = "; ".join(f"on rank {r} {text}" for r, text in texts if text)
    raise kind(f"{remedy} ({ranks})")


def empty_of_group(group_name: str) -> Tensor:
    """A tensor for `like`, where a call has none: on the accelerator that the group has a backend for, where calls that were
    compared cost nothing, or else on the device on which the group's objects travel.
    """
    group = distributed_c10d._resolve_process_group(group_name)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and backends_of(group).get(accelerator.type, "gloo") != "gloo":
        return torch.empty(0, device=accelerator)
    return torch.empty(0, device=distributed_c10d._get_object_coll_device(group))


def consensus(
    group_name: str, like: Tensor, question: object, own: object, answer: str | None
) -> str | None:
    """The ranks' common answer, `answer` on this one, to a question that is equal on all of them; None where they differ.

    A small collective the first time that this rank asks `question` with what is its `own`; as for
    `check_equal_on_all_ranks`, it is undefined what happens where another rank has asked earlier. Later, and while a
    CUDA graph is captured, what is remembered. None, too, where `question` differs: `check_equal_on_all_ranks` says so.
    """
    group = distributed_c10d._resolve_process_group(group_name)
    remembered, key = _consensus.setdefault(group, {}), (question, own)
    capturing = like.is_cuda and torch.cuda.is_current_stream_capturing()
    if key not in remembered and not capturing:
        raise_faults(group_name)
        answers = _gather(group, (question, answer))
        _raise_refusal(answers)
        if any(theirs[0] != question for theirs in answers):
            return None
        if len(remembered) >= _MAX_REMEMBERED:
            remembered.clear()
        remembered[key] = answer if all(theirs[1] == answer for theirs in answers) else None
    return remembered.get(key)


def _gather(group: dist.ProcessGroup, value: object) -> list:
    gathered: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _await_after_leaving(group: dist.ProcessGroup, group_name: str) -> None:
    """Returns once all ranks have left the same call: by the group's store, since a collective that times out ends NCCL's
    communicator, and the process with it."""
    call, count = _left[group]
    limit = timeout_ns() / 1e9
    store = distributed_c10d._get_process_group_store(group)
    keys = [f"fdattn/left/{count}/{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], call)
    try:
        store.wait(keys, timedelta(seconds=limit))
    except RuntimeError as error:
        store.delete_key(keys[group.rank()])  # a later group of this name has the same ones
        raise PeerTimeout(
            group_name, group.rank(), -1, call, 0,
            f"rank {group.rank()} left {call} by an exception, and the other ranks of group {group_name!r} did not come to its "
            f"next call within {limit:g} s: they time out in the one that it left, and raise PeerTimeout; make a new process "
            "group to go on",
        ) from error  # fmt: skip
    _left[group] = None, count


def _raise_refusal(by_rank: list) -> None:
    """The first one among what ranks have sent."""
    for rank, theirs in enumerate(by_rank):
        if isinstance(theirs, dict) and _REFUSED in theirs:
            kind, message = theirs[_REFUSED]
            raise _REFUSALS[kind](f"{message} (on rank {rank})")


def _compare(group: dist.ProcessGroup, values: Mapping[str, object]) -> None:
    """Raises on every rank, naming what differs."""
    texts_here = {name: v if name == _REFUSED else str(v) for name, v in values.items()}
    by_rank = _gather(group, texts_here)
    _raise_refusal(by_rank)
    for name in values:
        texts = [theirs.get(name) for theirs in by_rank]
        if len(set(texts)) > 1:
            ranks = ", ".join(f"{value} on rank {r}" for r, value in enumerate(texts))
            raise ValueError(f"{name} must be the same on all ranks, got {ranks}")


def _digest(key: tuple) -> Tensor:
    """64 bits of the values, the same in every process."""
    text = str([(name, str(value)) for name, value in key]).encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
    return torch.tensor([number])


def digest_of(value: object) -> int:
    """63 bits of what is written the same in every process."""
    return int(_digest((("", value),))) >> 1


def _digests_are_equal(group: dist.ProcessGroup, digest: Tensor) -> bool:
    digests = [torch.empty_like(digest) for _ in range(dist.get_world_size(group))]
    dist.all_gather(digests, digest, group=group)
    return all(torch.equal(x, digest) for x in digests)
