"""How one sequence of tokens is split over ranks: every rank holds some runs of consecutive positions.

Ring attention, training on sharded sequences and their batches all speak of this map. It lives on the
host and is the same on all ranks; which rank is asked for is always an argument.

Zigzag: with 2 W chunks, rank r holds chunks r and 2 W - 1 - r, so that under a causal mask every rank has
the same work (Brandon et al., Striped Attention, arXiv:2311.09431, discusses the imbalance; the zigzag
order is that of Llama 3's training, arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn.ops.options import window_bounds


class Run(NamedTuple):
    """Consecutive positions start … start + length - 1."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class SequenceShards(NamedTuple):
    """ranks[r] are the runs that rank r holds, in the order in which its tensors hold them.

    Together the runs are a partition of the positions 0 … total - 1. Shards may be uneven or empty.

    Examples:
        >>> shards = torch_fdattn.dist.SequenceShards.zigzag(8, 2)
        >>> shards.positions(0), shards.positions(1)
        (tensor([0, 1, 6, 7]), tensor([2, 3, 4, 5]))
        >>> torch_fdattn.dist.SequenceShards.from_lengths([5, 3]).lengths
        [5, 3]
    """

    ranks: tuple[tuple[Run, ...], ...]

    @classmethod
    def contiguous(cls, total: int, world_size: int) -> SequenceShards:
        """One run a rank, as even as possible, longer ones first."""
        return cls.from_lengths(_even(total, world_size))

    @classmethod
    def zigzag(cls, total: int, world_size: int) -> SequenceShards:
        """Chunks r and 2 W - 1 - r of 2 W: balanced under a causal mask."""
        chunks = _runs(_even(total, 2 * world_size))
        last = 2 * world_size - 1
        return cls(tuple(_joined([chunks[r], chunks[last - r]]) for r in range(world_size)))

    @classmethod
    def balanced(
        cls, total: int, world_size: int, *, cu_seqlens: Sequence[int] | Tensor | None = None,
        causal: bool = True, window: tuple[int, int] | None = None, chunks: int = 8,
        keys_per_query: Sequence[int] | Tensor | None = None,
    ) -> SequenceShards:  # fmt: skip
        """Shards in which each rank sees about as many pairs, whatever the mask, and holds at most as many chunks.

        The sequence is cut into `chunks` chunks a rank. The chunk with the most visible pairs that is left goes to the
        rank with the fewest so far, of those that have room (longest processing time first, Graham 1969).

        Args:
            cu_seqlens: where packed documents begin, and where the last one ends, as for `ring_attention`.
            causal, window: the mask, as for `torch_fdattn.attention`.
            chunks: more balance better, and make more and smaller kernel calls.
            keys_per_query: of any other mask, in place of these: how many keys each of the total queries sees, integers from
                0 to total. (Of a prefix that all queries see, `torch.arange(1, total + 1).clamp(min=prefix)`.)

        Examples:
            >>> shards = torch_fdattn.dist.SequenceShards.balanced(64, 2, cu_seqlens=[0, 48, 64])
            >>> shards.lengths
            [32, 32]
        """
        if type(chunks) is not int or chunks < 1:
            raise ValueError(f"chunks must be an int of at least 1, got {chunks!r}")
        runs = [run for run in _runs(_even(total, chunks * world_size)) if run.length]
        if keys_per_query is None:
            seen = _seen(total, cu_seqlens, causal, window)
        elif cu_seqlens is not None or window is not None:
            raise ValueError(
                "cu_seqlens and window must be None with keys_per_query, which says what they say: give it alone"
            )
        else:
            seen = _numbers_of_keys(keys_per_query, total)
        work = torch.cat([torch.zeros(1, dtype=torch.int64), seen.cumsum(0)])
        of_run = {run: int(work[run.end] - work[run.start]) for run in runs}
        own: list[list[Run]] = [[] for _ in range(world_size)]
        done = [0] * world_size
        for run in sorted(runs, key=lambda run: -of_run[run]):
            rank = min(
                (r for r in range(world_size) if len(own[r]) < chunks), key=lambda r: done[r]
            )
            own[rank].append(run)
            done[rank] += of_run[run]
        return cls(tuple(_joined(sorted(each)) for each in own))

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> SequenceShards:
        """One run a rank, of the given lengths, in rank order."""
        return cls(tuple(_joined([run]) for run in _runs(lengths)))

    @classmethod
    def from_positions(cls, positions: Sequence[Sequence[int] | Tensor]) -> SequenceShards:
        """Any map: positions[r] are those of rank r's tokens, in its order.

        Attention costs one kernel call for each pair of runs that are only partly visible to each other, so
        a map of single positions is right but slow.

        Raises:
            ValueError: the positions of all ranks are not a permutation of 0 … total - 1.
        """
        lists = [p.tolist() if isinstance(p, Tensor) else list(p) for p in positions]
        everything = sorted(p for part in lists for p in part)
        if everything != list(range(len(everything))):
            raise ValueError(
                "positions of all ranks together must be each of 0 … total - 1 exactly once, "
                f"got {_first_fault(everything)}"
            )
        return cls(tuple(_joined([Run(p, 1) for p in part]) for part in lists))

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def total(self) -> int:
        return sum(run.length for runs in self.ranks for run in runs)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each rank."""
        return [sum(run.length for run in runs) for runs in self.ranks]

    def positions(
        self, rank: int, device: torch.device | str | None = None, *,
        cu_seqlens: Sequence[int] | Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """int64 (tokens of the rank,): the position of each of its tokens.

        cu_seqlens: of packed documents, as for `ring_attention`; then positions begin with 0 in each document.
        """
        parts = [torch.arange(run.start, run.end, device=device) for run in self.ranks[rank]]
        positions = torch.cat([torch.arange(0, device=device), *parts])
        documents = tuple(documents_of(cu_seqlens))
        if not documents:
            return positions
        check_documents(documents, self.total)
        begins = torch.tensor(documents[:-1], dtype=torch.int64, device=device)
        return positions - begins[torch.bucketize(positions, begins, right=True) - 1]

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """The rank's part of x, which has all positions (a copy, unless it is one run)."""
        if x.shape[dim] != self.total:
            raise ValueError(f"x must have {self.total} positions in dim {dim}, got {x.shape[dim]}")
        runs = self.ranks[rank] or (Run(0, 0),)
        parts = [x.narrow(dim, run.start, run.length) for run in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """All positions from all ranks' parts (in rank order, each at least as long as its shard)."""
        runs_of_all = []
        for runs, part in zip(self.ranks, parts, strict=True):
            offset = 0
            for run in runs:
                runs_of_all.append((run.start, part.narrow(dim, offset, run.length)))
                offset += run.length
        ordered = [part for _, part in sorted(runs_of_all, key=lambda item: item[0])]
        return torch.cat(ordered, dim) if ordered else parts[0].narrow(dim, 0, 0)

    def flat(self) -> list[int]:
        """(world size, then rank, start, length of each run): the form in which ops take it."""
        runs = [(r, *run) for r, runs in enumerate(self.ranks) for run in runs]
        return [self.world_size, *(number for run in runs for number in run)]

    @classmethod
    def from_flat(cls, numbers: Sequence[int]) -> SequenceShards:
        """The inverse of `flat`."""
        world_size, *rest = (int(number) for number in numbers)
        ranks: list[list[Run]] = [[] for _ in range(world_size)]
        for r, start, length in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
            ranks[r].append(Run(start, length))
        return cls(tuple(tuple(runs) for runs in ranks))


def documents_of(cu_seqlens: Tensor | Sequence[int] | None) -> list[int]:
    """cu_seqlens as ints on the host; none for None."""
    if cu_seqlens is None:
        return []
    documents = _host_ints("cu_seqlens", cu_seqlens)
    if not documents:
        raise ValueError(
            "cu_seqlens must begin with 0 and end with the tokens of all ranks, got []"
        )
    return documents


def prefixes_of(prefix_lens: int | Tensor | Sequence[int] | None) -> list[int]:
    """prefix_lens as ints on the host; none for None."""
    if prefix_lens is None:
        return []
    if type(prefix_lens) is int:
        prefix_lens = [prefix_lens]
    prefixes = _host_ints("prefix_lens", prefix_lens)
    if not prefixes:
        raise ValueError("prefix_lens must have a number for each document, got []")
    return prefixes


def _host_ints(name: str, given: Tensor | Sequence[int]) -> list[int]:
    if isinstance(given, Tensor):
        if torch.compiler.is_compiling():
            raise TypeError(
                f"{name} must be a list of ints inside of a graph, got a tensor: give {name}.tolist(), "
                "taken outside of it"
            )
        given = given.tolist()
    if not isinstance(given, (list, tuple)) or not all(type(x) is int for x in given):
        raise TypeError(
            f"{name} must be an integer tensor of one dimension, a list of ints or None, got {given!r}"
        )
    _expect_int64(name, given)
    return list(given)


def flat_ints(shards: SequenceShards) -> list[int]:
    """`SequenceShards.flat`, of runs that are ints: what an op takes, and no op can refuse on all ranks."""
    said = f"shards must hold runs (start, length) of ints for each rank, got {shards.ranks}"
    try:
        numbers = shards.flat()
    except TypeError as error:
        raise TypeError(said) from error
    if not all(isinstance(x, int) or hasattr(x, "__index__") for x in numbers):
        raise TypeError(said)
    _expect_int64("shards", numbers)
    return numbers


def _expect_int64(name: str, numbers: Sequence[int]) -> None:
    """A number that an op's schema cannot hold would be refused on one rank alone."""
    beyond = [x for x in numbers if not -(2**63) <= x < 2**63]
    if beyond:
        raise ValueError(f"{name} must be numbers of 64 bits, got {beyond[0]}")


def check_documents(documents: tuple[int, ...], total: int) -> None:
    """Raises ValueError where they are no partition of all tokens; none at all is one document."""
    ends = (documents[0], documents[-1]) if documents else (0, total)
    if ends != (0, total) or any(a > b for a, b in itertools.pairwise(documents)):
        raise ValueError(
            f"cu_seqlens must begin with 0, end with the {total} tokens of all ranks and not fall between, "
            f"got {list(documents)}"
        )


def check_prefixes(prefixes: tuple[int, ...], documents: tuple[int, ...], total: int) -> None:
    """Raises ValueError where they are not one for each document, or one for all, of at most its tokens."""
    lengths = [b - a for a, b in itertools.pairwise(documents or (0, total))]
    if prefixes and len(prefixes) not in (1, len(lengths)):
        raise ValueError(
            f"prefix_lens must be one number, or one for each of the {len(lengths)} documents, got {len(prefixes)}"
        )
    for index, length in enumerate(lengths if prefixes else ()):
        prefix = prefixes[index % len(prefixes)]
        if not 0 <= prefix <= length:
            raise ValueError(
                f"prefix_lens must be from 0 to the {length} tokens of document {index}, got {prefix}"
            )


def expect_chunk(chunk: object) -> None:
    """0: none."""
    if type(chunk) is not int or chunk < 0:
        raise (ValueError if type(chunk) is int else TypeError)(
            f"attention_chunk must be an int of at least 1, or 0 or None for no chunks, got {chunk!r}"
        )


def expect_window_within(window: tuple[int, int], total: int) -> None:
    """Neither bound is beyond the sequence of all ranks' tokens, which is no mistake on one process but is one here: of a
    length that is a rank's, or in other units.
    """
    if max(window) > total:
        raise ValueError(
            f"window must lie within the {total} tokens of all ranks, got {tuple(window)}: -1 is no bound"
        )


def chunked(documents: tuple[int, ...], total: int, chunk: int) -> tuple[int, ...]:
    """Documents, cut into chunks of as many tokens, counted from each one's first; 0: as they are."""
    if not chunk:
        return documents
    begins = itertools.pairwise(documents or (0, total))
    return (*(x for begin, end in begins for x in range(begin, end, chunk)), total)


def _seen(
    total: int,
    cu_seqlens: Sequence[int] | Tensor | None,
    causal: bool,
    window: tuple[int, int] | None,
) -> Tensor:
    """int64 (total,): how many keys each position sees."""
    documents = tuple(documents_of(cu_seqlens)) or (0, total)
    check_documents(documents, total)
    begins = torch.tensor(documents)
    lengths = begins.diff()
    position = torch.arange(total)
    first = begins[:-1].repeat_interleave(lengths)
    last = begins[1:].repeat_interleave(lengths) - 1
    left, right = window_bounds(window)
    if causal:
        right = 0
    if left >= 0:
        first = torch.maximum(first, position - left)
    if right >= 0:
        last = torch.minimum(last, position + right)
    return last - first + 1


def _numbers_of_keys(given: Sequence[int] | Tensor, total: int) -> Tensor:
    """int64 (total,), of `balanced`'s keys_per_query."""
    numbers = torch.as_tensor(given).cpu()
    if numbers.dtype == torch.bool or (numbers.is_floating_point() and numbers.numel()):
        raise TypeError(f"keys_per_query must hold integers, got {numbers.dtype}")
    if numbers.shape != (total,):
        raise ValueError(
            f"keys_per_query must have shape {(total,)}, a number for each query, got {tuple(numbers.shape)}"
        )
    if total and not 0 <= int(numbers.min()) <= int(numbers.max()) <= total:
        raise ValueError(
            f"keys_per_query must be from 0 to {total}, got {int(numbers.min())} to {int(numbers.max())}"
        )
    return numbers.long()


def named_shards(name: str, local: int, world_size: int) -> SequenceShards:
    """The even shards of a name, "contiguous" or "zigzag", from one rank's number of tokens."""
    if name == "contiguous":
        return SequenceShards.contiguous(local * world_size, world_size)
    if name == "zigzag":
        if local % 2:
            raise ValueError(
                "shards='zigzag' by name needs an even number of tokens on every rank, "
                f"got {local}; give SequenceShards.zigzag(total, world_size) instead"
            )
        return SequenceShards.zigzag(local * world_size, world_size)
    raise ValueError(f"shards must be 'contiguous', 'zigzag' or a SequenceShards, got {name!r}")


def _even(total: int, parts: int) -> list[int]:
    if total < 0 or parts < 1:
        raise ValueError(
            f"total must be at least 0 and world_size at least 1, got {total} and {parts}"
        )
    return [total // parts + (i < total % parts) for i in range(parts)]


def _runs(lengths: Sequence[int]) -> list[Run]:
    runs, start = [], 0
    for length in lengths:
        runs.append(Run(start, length))
        start += length
    return runs


def _joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Without empty runs, and neighbours that continue each other as one."""
    joined: list[Run] = []
    for run in runs:
        if joined and joined[-1].end == run.start:
            joined[-1] = Run(joined[-1].start, joined[-1].length + run.length)
        elif run.length:
            joined.append(run)
    return tuple(joined)


def _first_fault(everything: Sequence[int]) -> str:
    for expected, got in enumerate(everything):
        if got != expected:
            return f"{got} where {expected} should come"
    return "none"
