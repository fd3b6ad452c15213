"""Training on a sequence split over ranks: shard a batch, attend through the ring, join the results.

    shards = SequenceShards.zigzag(total, world_size)
    tokens, positions, labels = shard_batch(group, shards, tokens, positions, labels)
    with context_parallel(group, shards=shards):
        loss = model(tokens, positions, labels)        # its attention calls are ring attention

in the manner of `torch.distributed.tensor.experimental.context_parallel`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from torch_fdattn import checks
from torch_fdattn.dist.consensus import (
    check_equal_on_all_ranks,
    empty_of_group,
    raise_on_all_ranks,
    refuse_on_all_ranks,
    refusing_on_all_ranks,
)
from torch_fdattn.dist.functional import ring_attention
from torch_fdattn.dist.groups import Group, name_of, rank_and_size
from torch_fdattn.dist.point_to_point import all_to_all
from torch_fdattn.dist.ring_attention.auto import AUTO
from torch_fdattn.dist.ring_attention.checkpoints import BACKWARDS, engine_in, record_attention
from torch_fdattn.dist.ring_attention.local_attention import (
    name_of_local_attention,
    refuse_compiled,
    refuse_local,
)
from torch_fdattn.dist.ring_attention.op import STRATEGIES, expect_hierarchy
from torch_fdattn.dist.ring_attention.sequence_shards import (
    SequenceShards,
    documents_of,
    flat_ints,
    prefixes_of,
)
from torch_fdattn.dist.ring_attention.transformers_layers import (
    AcceptedPositions,
    check_sdpa,
    compare_positions,
)
from torch_fdattn.dist.state_tree import expect_block


def shard_batch(
    group: Group, shards: SequenceShards, *tensors: Tensor, dim: int = 1
) -> list[Tensor]:
    """This rank's part of each tensor (…, total, …): tokens, positions, labels, masks.

    Labels must already be shifted against the tokens: the next token may be another rank's.

    Examples:
        >>> world = torch.distributed.get_world_size()
        >>> shards = torch_fdattn.dist.SequenceShards.zigzag(16 * world, world)
        >>> tokens = torch.arange(16 * world)[None]
        >>> (part,) = torch_fdattn.dist.shard_batch(None, shards, tokens)
        >>> part.shape
        torch.Size([1, 16])
    """
    rank = _rank(name_of(group), shards)
    return [shards.shard(x, rank, dim).contiguous() for x in tensors]


def unshard_batch(
    group: Group, shards: SequenceShards, *parts: Tensor, dim: int = 1
) -> list[Tensor]:
    """The tensors (…, total, …) of all ranks' parts, on every rank; not differentiable.

    Raises:
        ValueError: another number of tokens than the rank has, or parts that differ otherwise between ranks.

    Examples:
        >>> world = torch.distributed.get_world_size()
        >>> shards = torch_fdattn.dist.SequenceShards.zigzag(16 * world, world)
        >>> tokens = torch.arange(16 * world)[None]
        >>> parts = torch_fdattn.dist.shard_batch(None, shards, tokens)
        >>> (joined,) = torch_fdattn.dist.unshard_batch(None, shards, *parts)
        >>> torch.equal(joined, tokens)
        True
    """
    group_name = name_of(group)
    rank = _rank(group_name, shards)
    joined = []
    for part in parts:
        with refusing_on_all_ranks(group_name, part):
            if part.shape[dim] != shards.lengths[rank]:
                raise ValueError(
                    f"parts must have {shards.lengths[rank]} tokens in dim {dim} on rank {rank}, "
                    f"got {part.shape[dim]}"
                )
        rows = part.detach().movedim(dim, 0)
        equal = {"shards": shards, "dim": dim, "parts' dtype": part.dtype}
        check_equal_on_all_ranks(
            group_name, part, equal | {"parts' shape beside dim": tuple(rows.shape[1:])}
        )
        shapes = [[length, *rows.shape[1:]] for length in shards.lengths]
        received = all_to_all([rows] * shards.world_size, shapes, group_name)
        joined.append(shards.join(received, dim=0).movedim(0, dim))
    return joined


@contextlib.contextmanager
def context_parallel(
    group: Group, *, shards: SequenceShards, buffers: Sequence[Tensor] = (),
    seq_dims: Sequence[int] = (), strategy: str = "ring", hierarchy: tuple[Group, Group] | None = None,
    invariant_block: int | None = None, prefix_lens: int | Tensor | Sequence[int] | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Inside it, attention calls are ring attention over the group.

    Args:
        group: the process group: itself, its name, a DeviceMesh of one dimension, or None for the default one.
        shards: which positions each rank holds.
        buffers: tensors of all positions that become this rank's shards inside, in place, and are restored afterwards
            (what they held, not what was written to the shards).
        seq_dims: the dim of each buffer that is the sequence.
        strategy, hierarchy, invariant_block: as `ring_attention`, "query_split" excepted.
        prefix_lens: as `ring_attention`, of every attention call, which must be causal and have no window: a causal model
            becomes a prefix-LM.
        cu_seqlens: packed documents, as `ring_attention`: in every attention call documents do not see each other, besides
            what the call hides.

    Taken over are, on q, k and v of this rank's tokens,

    - `F.scaled_dot_product_attention` and `torch_fdattn.attention`: causal, windows, softcap, ALiBi slopes and sinks (each
      rank's gradient is a part, to be summed over the ranks), dropout, and masks (…, S_r, total) of this rank's rows, with a column for each position
      (a row whose entries are all finfo.min gives 0, as `torch_fdattn.attention` says);
    - `torch_fdattn.varlen_attention` on (S_r, H, D), with the cu_seqlens_q of the whole sequence, the same on every rank:
      documents may lie over ranks' borders.

    With other masks, lengths or positions they raise NotImplementedError (`varlen_attention` has no dropout), and so does
    what would attend to this rank's tokens only: nn.MultiheadAttention, aten's ops of SDPA, `varlen_attn`,
    torch_fdattn.attention_fp8, decode and paged_decode, ops of flash_attn and xformers, and attention written out, which
    is known by a softmax, log_softmax or logsumexp over (B, H, …, S_r, S_r) or (B · H, S_r, S_r) scores, or a softmax in a
    function named eager_attention_forward. Attention in functions that `torch.compile` made, `flex_attention` too, raises
    Dynamo's error, which names it: for compiled models the backend "fdattn" has options={"context_parallel": …}.
    Nothing sees attention written with exp and sum or in chunks of queries, functions that `torch.jit.trace` made outside,
    other threads, and kernels that are not ops of torch: they attend to this rank's tokens.
    A window beyond the sequence is none, as that of a model over a short one. Arguments are compared on entry.
    With activation checkpointing the backward belongs inside too, because it calls attention again; outside it raises.
    Losses of ranks add up: DistributedDataParallel and FSDP, which average gradients, need losses times the ranks.

    The rest of the model must work token by token, and be given the positions of this rank's tokens (`shard_batch`):
    what it counts by itself, or computes from its input's length, is of one rank's part. For models of transformers
    `attn_implementation="fdattn"` (`torch_fdattn.dropins.transformers.register()`) holds what it can of that.

    Examples:
        >>> world = torch.distributed.get_world_size()
        >>> shards = torch_fdattn.dist.SequenceShards.zigzag(16 * world, world)
        >>> q, k, v = torch.randn(3, 1, 4, 16, 16)  # of this rank's tokens
        >>> with torch_fdattn.dist.context_parallel(None, shards=shards):
        ...     out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> out.shape
        torch.Size([1, 4, 16, 16])
    """
    group_name = name_of(group)
    rank_and_size(group_name)  # which names the argument where no group has this name
    like = buffers[0] if buffers and isinstance(buffers[0], Tensor) else empty_of_group(group_name)
    with refusing_on_all_ranks(group_name, like):
        if len(buffers) != len(seq_dims):
            raise ValueError(
                f"seq_dims must have one dim for each buffer, got {len(seq_dims)} for {len(buffers)}"
            )
        for x, dim in zip(buffers, seq_dims, strict=True):
            checks.expect_tensor("buffers", x)
            if not -x.dim() <= dim < x.dim():
                raise ValueError(f"seq_dims must be dims of the buffers, got {dim} of {x.dim()}")
        prefixes, documents = tuple(prefixes_of(prefix_lens)), tuple(documents_of(cu_seqlens))
        options = dict(hierarchy=hierarchy, invariant_block=invariant_block, prefix_lens=prefixes or None, cu_seqlens=documents or None)  # fmt: skip
        mode = RingMode(group_name, shards, strategy, **options)
        parts = [
            shard_batch(group_name, shards, x, dim=dim)[0]
            for x, dim in zip(buffers, seq_dims, strict=True)
        ]
    check_equal_on_all_ranks(
        group_name,
        like,
        {
            "shards": shards,
            "strategy": strategy,
            "invariant_block": invariant_block,
            "prefix_lens": prefixes,
            "cu_seqlens": documents,
            "seq_dims": tuple(seq_dims),
        },
    )
    unsharded = [x.data for x in buffers]
    try:
        for x, part in zip(buffers, parts, strict=True):
            x.data = part
        with mode:
            yield
    finally:
        for x, data in zip(buffers, unsharded, strict=True):
            x.data = data


def check_strategy(strategy: str, where: str) -> None:
    """Raises ValueError for one that `ring_attention` does not have, or that takes unsharded keys."""
    usable = AUTO, *(name for name in STRATEGIES if name != "query_split")
    if strategy not in usable:
        raise ValueError(
            f"strategy must be one of {usable} inside {where}, where keys are sharded too, got {strategy!r}"
        )


#: What goes over the ranks, and how errors name it.
_ATTENTION = {
    F.scaled_dot_product_attention: "scaled_dot_product_attention",
    torch.ops.fdattn.attention: "attention",
    torch.ops.fdattn.attention.default: "attention",
    torch.ops.fdattn.varlen_attention: "varlen_attention",
    torch.ops.fdattn.varlen_attention.default: "varlen_attention",
}


class RingMode(TorchFunctionMode):
    """Sends attention calls to ring attention; everything else goes its way."""

    def __init__(
        self, group_name: str, shards: SequenceShards, strategy: str, **options: object
    ) -> None:
        """options: more of `ring_attention`'s."""
        super().__init__()
        self._rank = _rank(group_name, shards)
        check_strategy(strategy, "context_parallel")
        expect_block(options.get("invariant_block"))
        expect_hierarchy(strategy, options.get("hierarchy"))
        self._group_name, self._shards, self._total = group_name, shards, shards.total
        self._options = dict(group=group_name, shards=shards, strategy=strategy, **options)
        #: where packed documents begin, and where the last one ends; () of none
        self.documents = tuple(options.get("cu_seqlens") or ())
        self._last_read: tuple[weakref.ref[Tensor], int, list[int]] | None = None

    @property
    def total(self) -> int:
        """Tokens of all ranks."""
        return self._total

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(self._shards.lengths)

    @functools.cached_property
    def accepted_positions(self) -> AcceptedPositions:
        """What this rank's tokens may be given."""
        return AcceptedPositions.of(self._shards, self._rank, self.documents)

    def compare_positions(
        self, position_ids: Tensor, device: torch.device, said: str | None, remedy: str
    ) -> None:
        """`transformers_layers.compare_positions` of the ranks that share the sequence."""
        compare_positions(
            self._group_name, device, position_ids, self.accepted_positions, said, remedy
        )

    def raise_on_all_ranks(
        self, device: torch.device, kind: type[Exception], said: str | None, remedy: str
    ) -> None:
        """`consensus.raise_on_all_ranks` of the ranks that share the sequence."""
        raise_on_all_ranks(self._group_name, device, kind, said, remedy)

    def refuse(self, like: Tensor, message: str) -> NoReturn:
        """`consensus.refuse_on_all_ranks` of the ranks that share the sequence."""
        refuse_on_all_ranks(self._group_name, like, message)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _ATTENTION:
            name = _ATTENTION[func]
            if torch.compiler.is_compiling():
                refuse_compiled(
                    f"{name} of a compiled function inside context_parallel is not supported"
                )
            record_attention(self._options)
            return getattr(self, f"_{name}")(*args, **kwargs)
        if func in BACKWARDS:
            with engine_in(self):
                return func(*args, **kwargs)
        name = name_of_local_attention(func, args, kwargs, self._shards.lengths[self._rank])
        if name is not None:  # of all ranks, which run the same program
            refuse_local(name)
        return func(*args, **kwargs)

    def _scaled_dot_product_attention(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
        enable_gqa=False,
    ):  # fmt: skip
        check_sdpa(self, query, attn_mask, sys._getframe(2))
        others = {} if self._has_all_keys(attn_mask) else {"attn_mask": attn_mask}
        self._refuse("scaled_dot_product_attention", query, **others)
        del enable_gqa  # groups follow from the head counts
        return ring_attention(
            query, key, value, causal=is_causal, scale=scale, attn_mask=attn_mask, dropout_p=dropout_p,
            **self._options,
        )[0]  # fmt: skip

    def _attention(
        self, q, k, v, kv_lens=None, q_start=None, kv_start=None, *, causal=False, window_left=-1,
        window_right=-1, kv_block=0, kv_stride=0, scale=None, softcap=0.0, alibi_slopes=None,
        sinks=None, attn_mask=None, dropout_p=0.0, dropout_seed=None, **options,
    ):  # fmt: skip
        window = self._within(window_left, window_right)
        if not self._has_all_keys(attn_mask):
            options["attn_mask"] = attn_mask
        # Whether lengths count all ranks' tokens or this one's, nothing shows.
        self._refuse("attention", q, kv_lens=kv_lens, q_start=q_start, kv_start=kv_start,
                     kv_block=kv_block, kv_stride=kv_stride, **options)  # fmt: skip
        return ring_attention(
            q, k, v, causal=causal, window=window, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes,
            sinks=sinks, attn_mask=attn_mask, dropout_p=dropout_p, dropout_seed=dropout_seed, **self._options,
        )  # fmt: skip

    def _varlen_attention(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k=None, page_table=None, kv_lens=None, q_start=None,
        kv_start=None, *, causal=False, window_left=-1, window_right=-1, kv_block=0, kv_stride=0, scale=None,
        softcap=0.0, alibi_slopes=None, sinks=None, layout="bhsd", **options,
    ):  # fmt: skip
        """Of this rank's tokens (S_r, H, D), and the documents of all tokens."""
        keys = None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k
        documents = self._numbers(cu_seqlens_q)
        if self.documents and list(self.documents) != documents:
            self.refuse(
                q,
                "varlen_attention inside context_parallel(cu_seqlens=…) has other cu_seqlens_q than it",
            )
        self._refuse("varlen_attention", q, cu_seqlens_k=keys, page_table=page_table, kv_lens=kv_lens, q_start=q_start,
                     kv_start=kv_start, kv_block=kv_block, kv_stride=kv_stride, **options)  # fmt: skip
        out, lse = ring_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), causal=causal, window=self._within(window_left, window_right),
            scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
            **self._options | {"cu_seqlens": documents},
        )  # fmt: skip
        return out[0].transpose(0, 1), lse[0]

    def _within(self, *window: int) -> tuple[int, ...]:
        """The same bounds; none where one is beyond the sequence, as a model's is over a short one."""
        return tuple([-1 if bound >= self._total else bound for bound in window])

    def _has_all_keys(self, mask: Tensor | None) -> bool:
        """Whether a mask has a column for each position of the sequence, and not for this rank's alone."""
        return mask is None or (mask.dim() > 0 and mask.shape[-1] == self.total)

    def _numbers(self, cu_seqlens: Tensor) -> list[int]:
        """On the host: read once where all layers are given one tensor of a GPU, which is waited for."""
        if not cu_seqlens.is_cuda or cu_seqlens.is_inference():
            return cu_seqlens.tolist()
        last = self._last_read
        if last is None or last[0]() is not cu_seqlens or last[1] != cu_seqlens._version:
            last = weakref.ref(cu_seqlens), cu_seqlens._version, cu_seqlens.tolist()
            self._last_read = last
        return last[2]

    def _refuse(self, name: str, q: Tensor, **options: object) -> None:
        given = [
            x for x, value in options.items() if isinstance(value, Tensor) or value not in (None, 0)
        ]
        if given:
            supported = (
                "causal, window, scale, softcap, alibi_slopes, sinks, dropout of dense attention, masks over all keys "
                "and cu_seqlens_q of all tokens"
            )
            self.refuse(
                q, f"{name} inside context_parallel supports {supported}, got {', '.join(given)}"
            )


def active() -> RingMode | None:
    """The innermost `context_parallel` that is under way in this thread, if one is."""
    modes = [x for x in _get_current_function_mode_stack() if isinstance(x, RingMode)]
    return modes[-1] if modes else None


def _rank(group_name: str, shards: SequenceShards) -> int:
    rank, world_size = rank_and_size(group_name)
    if not isinstance(shards, SequenceShards):
        raise TypeError(
            f"shards must be a SequenceShards, got {type(shards).__name__}: "
            f"SequenceShards.zigzag(total, {world_size}), say"
        )
    if shards.world_size != world_size:
        raise ValueError(
            f"shards must be for the group's {world_size} ranks, got {shards.world_size}"
        )
    flat_ints(shards)
    return rank
