"""The third result of return_attn_probs, in torch: which weights dropout dropped, as signs. For tests alone."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fdattn.dropins.flash_attn.arguments import ScoreOptions
from torch_fdattn.ops.attention.dropout import Dropout, kept_weights
from torch_fdattn.ops.attention.reference import accumulated
from torch_fdattn.ops.positions import Mask, query_key_positions, visible
from torch_fdattn.ops.scores import Scores, modify_scores

#: FlashAttention rounds the sizes of these tensors up to multiples of it.
_MULTIPLE = 128


def rounded(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE


@torch.no_grad()
def dense_probs(
    q: Tensor, k: Tensor, options: ScoreOptions, dropout_p: float, seed: Tensor, sequence: int = 0
) -> Tensor:
    """(B, H, S, S_k), both rounded: exp(score - the row's largest), negative where dropped, 0 where hidden.

    sequence: the first one's number among those that dropout counts.
    """
    batch, q_len, heads, _ = q.shape
    kv_len, left, right = k.shape[1], *options["window"]
    mask = Mask(window_left=left, window_right=0 if options["causal"] else right).clamped
    q_pos, k_pos, _ = query_key_positions(mask, q_len, kv_len, q.device)
    k = accumulated(k).repeat_interleave(heads // k.shape[2], 2)
    scores = options["scale"] * torch.einsum("bshd,bthd->bhst", accumulated(q), k)
    distance = k_pos[:, None, :] - q_pos[:, :, None]
    scores = modify_scores(scores, distance, Scores(options["softcap"], options["alibi_slopes"]))
    seen = visible(mask, q_len, kv_len, q.device)[:, None]
    scores = scores.masked_fill(~seen, float("-inf"))
    # A row without keys has no largest score; 0 in its place gives weights of 0.
    largest = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0) if kv_len else 0.0
    kept = kept_weights(Dropout(dropout_p, seed), q_pos, k_pos, batch, heads, sequence)
    weights = torch.exp(scores - largest)
    signed = torch.where(kept, weights, -weights).to(q.dtype)
    return F.pad(signed, (0, rounded(kv_len) - kv_len, 0, rounded(q_len) - q_len))


@torch.no_grad()
def varlen_probs(
    q: Tensor, k: Tensor, begins: tuple[Tensor, Tensor], longest: tuple[int, int], options: ScoreOptions,
    dropout_p: float, seed: Tensor,
) -> Tensor:  # fmt: skip
    """(sequences, H, S, S_k), the longest lengths rounded; it reads where sequences begin."""
    (of_q, of_k), slopes = (x.tolist() for x in begins), options["alibi_slopes"]
    sizes = tuple(map(rounded, longest))
    for name, begins_of, given in zip("qk", (of_q, of_k), longest, strict=True):
        needed = max(b - a for a, b in pairwise(begins_of))
        if given < needed:
            raise ValueError(
                f"max_seqlen_{name} must be at least the longest sequence's length {needed} with return_attn_probs, got {given}"
            )
    probs = q.new_zeros(len(of_q) - 1, q.shape[1], *sizes)
    for b in range(len(of_q) - 1):
        rows, keys = q[of_q[b] : of_q[b + 1]], k[of_k[b] : of_k[b + 1]]
        if not len(rows) or not len(keys):
            continue
        own = (
            options
            if slopes is None or slopes.dim() == 1
            else {**options, "alibi_slopes": slopes[b]}
        )
        part = dense_probs(rows[None], keys[None], own, dropout_p, seed, b)[0, :, : len(rows), : len(keys)]  # fmt: skip
        probs[b, :, : len(rows), : len(keys)] = part
    return probs
