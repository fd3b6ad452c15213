"""The three classes that vLLM asks for: what the backend can do, what a batch looks like, and a layer's attention.

vLLM's cache of a layer is (blocks, KV heads, block, 2 · head size), keys before values in the last dimension, of any
order of memory: two views of it are our pages. A batch is packed, (tokens, heads, head size), each request with its
new tokens and a row of the block table.

    do_kv_cache_update   `paged_append_kv`, each token a sequence of one page
    forward              `paged_decode` where every request has one token, else `varlen_attention` on pages;
                         under decode context parallelism `varlen_attention` at the positions of this rank's
                         keys, whose partial states the ranks exchange and merge in fp32

What ours cannot do is refused: by `validate_configuration`, where vLLM asks it (its CPU platform does not), and when
a layer is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_dcp_group, get_dcp_world_size_and_rank
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

from torch_fdattn import checks
from torch_fdattn.checks import MAX_HEAD_DIM
from torch_fdattn.dist.decode import all_gather
from torch_fdattn.dist.decode.partial_states import MergeGroup
from torch_fdattn.functional import (
    paged_append_kv,
    paged_decode,
    varlen_attention,
    window_bounds,
)
from torch_fdattn.ops.options import AttentionOptions, options_to_mask
from torch_fdattn.ops.scores import Scores

HEAD_SIZES = tuple(range(16, MAX_HEAD_DIM + 1, 8))


class FdattnBackend(AttentionBackend):
    """Decoder attention over vLLM's paged cache: causal, sliding windows, softcap, ALiBi, sinks, groups of heads.

    Source: vLLM 0.32, vllm/v1/attention/backend.py.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FdattnImpl]:
        return FdattnImpl

    @staticmethod
    def get_builder_cls() -> type[FdattnMetadataBuilder]:
        return FdattnMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


@dataclass
class FdattnMetadata(AttentionMetadata):
    """A batch of requests, as a layer's forward needs it."""

    num_tokens: int  #: of the batch, without padding
    is_decode: bool  #: every request has one token
    query_starts: Tensor  #: int32 (requests + 1,), where each request's new tokens begin
    kv_lens: Tensor  #: int32 (requests,), its keys in this rank's cache, the new ones included
    block_table: Tensor  #: int32 (requests, blocks a request)
    #: q_start, kv_start, kv_block and kv_stride of `varlen_attention`, where keys are dealt to ranks.
    positions: tuple[Tensor, Tensor, int, int] | None = None


class FdattnMetadataBuilder(AttentionMetadataBuilder[FdattnMetadata]):
    """Makes `FdattnMetadata` of what vLLM says of a batch. Nothing in it is read on the host."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._ranks, self._rank = get_dcp_world_size_and_rank(kv_cache_spec.dcp_sharded)
        self._interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FdattnMetadata:  # fmt: skip
        """The batch of these requests; the arguments are vLLM's."""
        common = common_attn_metadata
        if common_prefix_len:
            raise NotImplementedError(
                "common_prefix_len must be 0, cascade attention is not built, got "
                f"{common_prefix_len}"
            )
        _expect_decoder_batch(common)
        kv_lens, positions = common.seq_lens, None
        if self._ranks > 1:
            kv_lens = common.dcp_local_seq_lens
            positions = self._positions(common)
        return FdattnMetadata(
            num_tokens=common.num_actual_tokens,
            # One token at most, and as many tokens as requests: none has 0, as padding has.
            is_decode=common.max_query_len == 1 and common.num_actual_tokens == common.num_reqs,
            query_starts=common.query_start_loc,
            kv_lens=kv_lens,
            block_table=common.block_table_tensor,
            positions=positions,
        )

    def _positions(self, common: CommonAttentionMetadata) -> tuple[Tensor, Tensor, int, int]:
        """vLLM deals runs of `interleave` tokens to the ranks in turn."""
        q_start = common.compute_num_computed_tokens().to(torch.int32)
        kv_start = torch.full_like(q_start, self._rank * self._interleave)
        return q_start, kv_start, self._interleave, self._interleave * self._ranks


def _expect_decoder_batch(common: CommonAttentionMetadata) -> None:
    """Raises for what a batch can ask beyond causal attention of decoders."""
    if common.causal is not True:
        raise NotImplementedError(f"causal must be True, got {common.causal!r}")
    for name in ("encoder_seq_lens", "mm_req_doc_ranges", "rswa_prefix_lens"):
        if getattr(common, name) is not None:
            raise NotImplementedError(
                f"{name} must be None: encoders, bidirectional ranges and R-SWA are not built, got a value"
            )


def _expect_layer(
    num_heads: int, num_kv_heads: int, scale: float, alibi_slopes: list[float] | None,
    sliding_window: int | None, logits_soft_cap: float | None, sinks: Tensor | None,
) -> None:  # fmt: skip
    """Raises for what the ops would refuse at each call, or name otherwise."""
    checks.expect_int64(num_heads=num_heads, num_kv_heads=num_kv_heads)
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads must be a positive multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
        )
    checks.expect_number("scale", scale)
    if not 1e-37 <= scale <= 1e37:
        raise ValueError(f"scale must be a positive finite number, got {scale}")
    if sliding_window is not None:
        checks.expect_int64(sliding_window=sliding_window)
        if sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, or None, got {sliding_window}")
    if logits_soft_cap is not None:
        checks.expect_number("logits_soft_cap", logits_soft_cap)
        if logits_soft_cap != 0 and not 1e-37 <= logits_soft_cap <= 1e37:
            raise ValueError(
                f"logits_soft_cap must be a positive finite number, or 0 or None, got {logits_soft_cap}"
            )
    if alibi_slopes is not None and len(alibi_slopes) != num_heads:
        raise ValueError(
            f"alibi_slopes must have a number for each of {num_heads} heads, got {len(alibi_slopes)}"
        )
    if sinks is not None:
        checks.expect_tensor("sinks", sinks)
        checks.expect_shape("sinks", sinks, (num_heads,), "num_heads")


class FdattnImpl(AttentionImpl[FdattnMetadata]):
    """One layer's attention. lse is in natural logarithm, as decode context parallelism asks for.

    Args:
        num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name: vLLM's; a window of n lets a query see n keys, its own included.
        sinks: (num_heads,), a logit a head that joins the softmax.

    Raises:
        ValueError: a head size, scale, softcap, window, or number of heads, slopes or sinks that ours cannot take.
        NotImplementedError: what ours does not do, named: quantised caches, encoders, sinks over ranks, …
    """

    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = True

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None,
        kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None, **unsupported: Any,
    ) -> None:  # fmt: skip
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if head_size not in HEAD_SIZES:
            raise ValueError(
                f"head_size must be a multiple of 8 from 16 to {HEAD_SIZES[-1]}, got {head_size}"
            )
        _expect_layer(
            num_heads, num_kv_heads, scale, alibi_slopes, sliding_window, logits_soft_cap, sinks
        )
        if kv_cache_dtype != "auto":
            raise NotImplementedError(
                f"kv_cache_dtype must be auto, the model's own dtype, got {kv_cache_dtype}: leave --kv-cache-dtype out"
            )
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attn_type must be decoder, got {attn_type}")
        if unsupported:
            raise NotImplementedError(
                f"the backend of torch_fdattn takes no {', '.join(sorted(unsupported))}, got {unsupported}"
            )
        if self.pcp_world_size > 1:
            raise NotImplementedError(
                f"prefill_context_parallel_size must be 1, got {self.pcp_world_size}"
            )
        if self.dcp_world_size > 1 and (sinks is not None or num_kv_heads != 1):
            raise NotImplementedError(
                "decode context parallelism takes one KV head a rank and no sinks, got "
                f"{num_kv_heads} KV heads and sinks {'None' if sinks is None else 'given'}"
            )
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_size, self.scale = head_size, float(scale)
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = sliding_window
        self.sinks = sinks
        self._slopes = None
        if alibi_slopes is not None:
            self._slopes = torch.tensor(alibi_slopes, dtype=torch.float32)
        self._options: dict[str, Any] = dict(
            causal=True,
            window=None if sliding_window is None else (sliding_window - 1, 0),
            scale=self.scale,
            softcap=logits_soft_cap or 0,
        )

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:  # fmt: skip
        """Writes key and value (tokens, KV heads, head size) to the slots; a token of slot -1 is dropped."""
        tokens, block = slot_mapping.shape[0], kv_cache.shape[2]
        # -1 is on page -1, which is outside of the cache.
        page = slot_mapping.div(block, rounding_mode="floor").to(torch.int32)
        slot = slot_mapping.remainder(block).to(torch.int32)
        new = (x[:tokens].unsqueeze(2) for x in (key, value))
        paged_append_kv(*self._pages(kv_cache), page.unsqueeze(1), *new, slot)

    def forward(
        self, layer: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: FdattnMetadata | None, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Writes the attention of query (tokens, heads, head size) over the cache into output, of the same shape.

        attn_metadata: None in vLLM's profiling run, whose output is 0.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "output_scale and output_block_scale must be None, got a quantised output"
            )
        if attn_metadata is None:
            return output.zero_()
        batch = attn_metadata
        scores = dict(alibi_slopes=self._slopes_on(query.device), sinks=self.sinks)
        query, pages = query[: batch.num_tokens], self._pages(kv_cache)
        written = output[: batch.num_tokens]
        if batch.positions is not None:
            written.copy_(self._attend_over_ranks(query, pages, batch))
        elif batch.is_decode:
            rows = written.unsqueeze(2)
            lse = query.new_empty(rows.shape[:3], dtype=torch.float32)
            paged_decode(
                query.unsqueeze(2), *pages, batch.block_table, batch.kv_lens, **self._options,
                **scores, out=(rows, lse),
            )  # fmt: skip
        else:
            out, _ = varlen_attention(
                query, *pages, batch.query_starts, page_table=batch.block_table,
                kv_lens=batch.kv_lens, **self._options, **scores,
            )  # fmt: skip
            written.copy_(out)
        return output

    def _attend_over_ranks(
        self, query: Tensor, pages: tuple[Tensor, Tensor], batch: FdattnMetadata
    ) -> Tensor:
        """Every rank attends for all heads over its keys; an all-to-all takes to each the states of its own heads."""
        group = get_dcp_group()
        query, slopes = group.all_gather(query.contiguous(), dim=1), self._slopes_on(query.device)
        if slopes is not None:
            slopes = group.all_gather(slopes, dim=0)
        left, right = window_bounds(self._options["window"])
        mask = options_to_mask(
            batch.kv_lens, *batch.positions[:2], True, left, right, *batch.positions[2:]
        )
        scores = Scores(float(self._options["softcap"]), slopes)
        # The raw op: a partial state stays in fp32 until it is merged.
        options = AttentionOptions(mask, self.scale, scores, dtype=torch.float32)
        state = torch.ops.fdattn.varlen_attention_forward(
            query, *pages, batch.query_starts, None, batch.block_table, *options.to_raw()
        )
        ranks = MergeGroup(
            group.device_group.group_name, group.rank_in_group, group.world_size, head_sharded=True
        )
        # As of a batch of one: (1, H, T, D) and (1, H, T).
        out, lse = state[0].transpose(0, 1).unsqueeze(0), state[1].unsqueeze(0)
        merged, _ = all_gather.merge(out, lse, query.dtype, ranks)
        return merged[0].transpose(0, 1)

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, (blocks, KV heads, block, head size) each, where they lie."""
        return kv_cache[..., : self.head_size], kv_cache[..., self.head_size :]

    def _slopes_on(self, device: torch.device) -> Tensor | None:
        """vLLM gives the slopes as a list, before it is said where the layer runs."""
        if self._slopes is not None and self._slopes.device != device:
            self._slopes = self._slopes.to(device)
        return self._slopes
