"""Messages between the first rank of an engine and the others, beside the collectives of its steps.

They go over gloo in a group of their own, whatever the model's ranks use, and hold JSON: nothing that a client of a server
says is unpickled. Who waits for a message sleeps in the kernel. A process that ends, by whatever signal, closes its
connections, and whoever waits for it is told so at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

#: How long a rank that lives is waited for: to connect, and to take a message, for which it has a thread.
_LIMIT = timedelta(minutes=2)
_FOR_EVER = timedelta(days=3650)  # of an engine that nobody asks anything


class RankLost(RuntimeError):
    """Another rank of the engine has failed, or its process is gone.

    Examples:
        >>> issubclass(torch_fdattn.engine.RankLost, RuntimeError)
        True
    """


class MessageKind(IntEnum):
    """What follows a message's content."""

    STEP = 0  # a step
    END = 1  # the end that rank 0 was asked for
    FAILED = 2  # nothing: the sender cannot go on


class RankMessage(NamedTuple):
    """content: of a step and the end commands, and what happened where the sender has failed."""

    kind: MessageKind
    content: list | str


class RankMessages:
    """This rank's connections to the other ranks of a process group; all of them make one at the same time.

    Raises:
        RankLost: not all of them came.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = self._global_ranks = dist.get_process_group_ranks(group)
        # The group may be a part of all ranks, whose others do not come. The new one has them in another order, perhaps.
        try:
            self._group = dist.new_group(
                ranks, timeout=_LIMIT, backend="gloo", use_local_synchronization=True
            )
        except RuntimeError as error:
            raise RankLost(
                f"not all of the engine's {len(ranks)} ranks came to connect, by an AsyncLLM on the first and a Follower on each other "
                "one: see what the others say"
            ) from error

    def send(self, ranks: Sequence[int], message: RankMessage) -> None:
        """To each of these ranks of the group; of one thread at a time.

        Raises:
            RankLost: one of them is gone; the others get it all the same.
        """
        content = bytearray(json.dumps(message.content).encode() if message.content else b"")
        parts = [torch.tensor([message.kind, len(content)])]
        if content:
            parts.append(torch.frombuffer(content, dtype=torch.uint8))
        gone = []
        for rank in ranks:
            try:
                for part in parts:
                    dist.send(part, self._global_ranks[rank], group=self._group)
            except RuntimeError as error:
                gone.append((rank, error))
        for rank, error in gone:
            raise _lost(rank) from error

    def receive(self, rank: int) -> RankMessage:
        """The next one of this rank of the group, whenever it comes.

        Raises:
            RankLost: the rank is gone.
        """
        head, source = torch.empty(2, dtype=torch.int64), self._global_ranks[rank]
        try:
            dist.irecv(head, source, group=self._group).wait(_FOR_EVER)
            kind, count = head.tolist()
            content = torch.empty(count, dtype=torch.uint8)
            if count:
                dist.irecv(content, source, group=self._group).wait(_FOR_EVER)
        except RuntimeError as error:
            raise _lost(rank) from error
        return RankMessage(
            MessageKind(kind), json.loads(content.numpy().tobytes()) if count else []
        )


def _lost(rank: int) -> RankLost:
    return RankLost(f"rank {rank} of the engine is gone: its own output says why, or it was killed")
