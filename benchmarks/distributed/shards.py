"""The tensors of a decode case whose cache is sharded over ranks, and its exact answer.

Block sharding: of W ranks, rank r holds the positions from r · ⌈N / W⌉ on. Each rank makes its own part
and nothing else, so that a cache of a million tokens never exists as a whole. The answer is in fp64:
every rank attends to its own shard, and the partial results are merged in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_fdattn.testing import attention_oracle, check_close, check_lse, merge_oracle

from ..exact import max_abs_err
from ..ranks import Ranks, all_gather
from ..runner import DTYPES, generator
from ..shapes import DecodeCase

#: In fp32 torch's own error is noise: its largest over these forms of the formula and several inputs is what counts.
_FP32_ORACLES, _FP32_COPIES = ("textbook", "grouped", "fused"), 4
_ORACLES = ("grouped",)


@dataclass(frozen=True)
class Shard:
    """What one call reads on this rank.

    q (B, H, 1, D), the same on every rank; k, v (B, H_kv, capacity, D) of this one; lengths int32 (B,):
    the whole sequences', and how many of their keys are here.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    kv_lens: Tensor
    local_lens: Tensor

    def is_full(self, ranks: int) -> bool:
        """Whether every key of every rank's shard is valid, as calls without lengths take it."""
        return bool((self.kv_lens == ranks * self.k.shape[2]).all())


def capacity_of(case: DecodeCase, ranks: int) -> int:
    return -(-case.kv_len // ranks)


def shard_bytes(case: DecodeCase, ranks: int) -> int:
    """Of K and V on each rank, valid or not."""
    values = 2 * case.batch * case.kv_heads * capacity_of(case, ranks) * case.head_dim
    return values * DTYPES[case.dtype].itemsize


def make_shards(case: DecodeCase, ranks: Ranks, copies: int) -> list[Shard]:
    """`copies` inputs with values of their own."""
    device, dtype = ranks.device, DTYPES[case.dtype]
    shared, own = generator(device, 0), generator(device, 1 + ranks.rank)
    capacity = capacity_of(case, ranks.size)
    kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)
    local_lens = (kv_lens - ranks.rank * capacity).clamp(0, capacity).int()

    def random(made: torch.Generator, heads: int, length: int) -> Tensor:
        shape = case.batch, heads, length, case.head_dim
        return torch.randn(shape, generator=made, device=device, dtype=dtype)

    return [
        Shard(
            random(shared, case.heads, 1),
            random(own, case.kv_heads, capacity),
            random(own, case.kv_heads, capacity),
            kv_lens,
            local_lens,
        )
        for _ in range(copies)
    ]


class Answer:
    """The exact result of the first input, and how far torch's own is from it at the case's dtype."""

    def __init__(self, shards: Sequence[Shard], ranks: Ranks) -> None:
        self._dtype = shards[0].q.dtype
        fp32 = self._dtype == torch.float32
        self._torch_errors = []
        for shard in reversed(
            shards[: _FP32_COPIES if fp32 else 1]
        ):  # the first one's answer stays
            out, lse = _attend(shard, torch.float64, _ORACLES[0])
            self._out, self._lse = _merged(out, lse, ranks)
            for formulation in _FP32_ORACLES if fp32 else _ORACLES:
                # Merged with the exact lse: one at half precision would be off by whole percents.
                out, _ = _attend(shard, self._dtype, formulation)
                whole, _ = _merged(out.float(), lse, ranks)
                self._torch_errors.append(whole.to(self._dtype).double() - self._out)

    def error(self, out: Tensor) -> float:
        return max_abs_err(out, self._out)

    def check(self, out: Tensor, lse: Tensor | None) -> None:
        """Raises AssertionError, saying what is wrong, unless the error rule of `testing/errors.py` holds."""
        check_close("out", out, self._out, self._torch_errors, self._dtype)
        if lse is not None:
            check_lse(lse, self._lse, self._dtype)


def _attend(shard: Shard, dtype: torch.dtype, formulation: str) -> tuple[Tensor, Tensor]:
    """(out, lse) over this rank's keys, at `dtype`."""
    q, k, v = (x.to(dtype) for x in (shard.q, shard.k, shard.v))
    return attention_oracle(q, k, v, shard.local_lens.tolist(), formulation=formulation)


def _merged(out: Tensor, lse: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """(out, lse) over all ranks' keys, merged at the dtype of `out`."""
    parts = gathered(torch.cat([out, lse.to(out.dtype)[..., None]], -1), ranks)
    return merge_oracle(parts[..., :-1], parts[..., -1])


def gathered(own: Tensor, ranks: Ranks) -> Tensor:
    """(W, *own.shape): every rank's."""
    parts = own.new_empty((ranks.size, *own.shape))
    all_gather(parts, own.contiguous(), ranks)
    return parts


def check_equal_bits(ranks: Ranks, *results: Tensor) -> None:
    """Raises AssertionError on every rank unless all of them hold the same bits."""
    for name, result in zip(("out", "lse"), results, strict=True):
        parts = gathered(result.contiguous().view(-1).view(torch.uint8), ranks)
        wrong = [rank for rank in range(ranks.size) if not torch.equal(parts[rank], parts[0])]
        if wrong:
            raise AssertionError(f"{name} differs between rank 0 and rank {wrong[0]}")
