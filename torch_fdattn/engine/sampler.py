"""Draws the next token of every sequence of a batch, on the device, in a fixed number of operations.

    logits (n, vocab) → penalties → bans and grammars → temperature → min_p → top_k → top_p → draw

Each row depends on its own logits, parameters and random number alone. What no row of a step asks for is left out: that
changes no other row's result, since the operations left out would have changed nothing there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fdattn.engine.random_numbers import uniform
from torch_fdattn.engine.sampling_params import NO_TOKEN, SamplingParams
from torch_fdattn.engine.sequence_rows import SequenceRows
from torch_fdattn.ops.block_sums import BLOCK, BlockSums, block_sums

HIDDEN = float("-inf")


class SampleNeeds(NamedTuple):
    """What any row of a batch asks for."""

    draws: bool
    min_p: bool
    sorts: bool
    penalties: bool
    longest: int  # tokens of the longest sequence: how far penalties look

    @property
    def is_plain(self) -> bool:
        """Whether a temperature is all: what `PLAIN` draws."""
        return not (self.min_p or self.sorts or self.penalties)

    @classmethod
    def of(cls, params: list[SamplingParams], lengths: list[int]) -> SampleNeeds:
        draws = [x for x in params if x.temperature > 0]
        return cls(
            bool(draws), any(x.min_p > 0 for x in draws),
            any(x.top_k > 0 or x.top_p < 1 for x in draws), any(x.has_penalties for x in params), max(lengths),
        )  # fmt: skip


#: Draws at each row's temperature.
PLAIN = SampleNeeds(draws=True, min_p=False, sorts=False, penalties=False, longest=0)


class Constraints(NamedTuple):
    """What may not be drawn.

    banned: int64 (2, m), row of the batch and token; None: nothing is.
    allowed: bool (g, vocab) for the rows `allowed_rows` (g,) of the batch; None: no row has a grammar.
    """

    banned: tuple[Tensor, Tensor] | None = None
    allowed_rows: Tensor | None = None
    allowed: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        return self.banned is None and self.allowed is None


def sample(
    logits: Tensor, rows: SequenceRows, row_ids: Tensor, lengths: Tensor, needs: SampleNeeds,
    constraints: Constraints,
) -> Tensor:  # fmt: skip
    """Tokens int64 (n,) drawn from logits (n, vocab); NO_TOKEN for a row of no distribution (NaN, inf, or -inf alone).

    row_ids: int64 (n,), whose logits these are.
    lengths: int64 (n,), tokens that each sequence has: the drawn one stands at this position.
    """
    if needs.penalties:
        logits = penalise(logits.float(), rows, row_ids, lengths, needs.longest)
    logits = constrain(logits, constraints)
    temperature = rows.parameter("temperature", row_ids)[:, 0]
    # Never divided by what fp32 takes for 0 or inf: no 0 / 0, inf / inf.
    divisor = temperature.clamp(1e-30, 1e30)
    blocks = block_sums(logits, divisor)
    block = blocks.largest.argmax(-1, keepdim=True)
    largest = blocks.largest.gather(1, block)
    drawable = largest[:, 0].isfinite() & ~blocks.sums.isnan().any(-1)
    tokens = blocks.columns.gather(1, block)[:, 0]
    if needs.draws:
        if needs.min_p or needs.sorts:
            scaled = ((logits.float() - largest) / divisor[:, None]).where(drawable[:, None], 0)
            if needs.min_p:
                # Of probabilities p / p_max, which is exp of these.
                is_rare = scaled.exp() < rows.parameter("min_p", row_ids)
                scaled = scaled.masked_fill(is_rare, HIDDEN)
            if needs.sorts:
                top_p = rows.parameter("top_p", row_ids)
                scaled = keep_top(scaled, rows.top_k[row_ids][:, None], top_p)
            # Of rows that ask for none of these, the very numbers that they have without.
            logits = logits.masked_fill(scaled == HIDDEN, HIDDEN)
            blocks = block_sums(logits, divisor)
        indices = lengths - rows.prompt_lengths[row_ids]
        drawn = draw(logits, divisor, blocks, uniform(rows.seeds[row_ids], indices))
        tokens = torch.where(temperature > 0, drawn, tokens)
    return tokens.where(drawable, NO_TOKEN)


def penalise(
    logits: Tensor, rows: SequenceRows, row_ids: Tensor, lengths: Tensor, longest: int
) -> Tensor:
    """Repetition, presence and frequency penalties by the tokens that stand in the sequences' rows."""
    history = rows.tokens[row_ids, :longest]
    position = torch.arange(history.shape[1], device=logits.device)
    is_output = position >= rows.prompt_lengths[row_ids][:, None]
    is_there = position < lengths[:, None]
    zeros = torch.zeros_like(logits)
    outputs = zeros.scatter_add(1, history, (is_output & is_there).float())
    tokens = zeros.scatter_add(1, history, is_there.float())

    repetition = rows.parameter("repetition_penalty", row_ids)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(tokens > 0, repeated, logits)
    logits = logits - rows.parameter("frequency_penalty", row_ids) * outputs
    return logits - rows.parameter("presence_penalty", row_ids) * (outputs > 0)


def constrain(logits: Tensor, constraints: Constraints) -> Tensor:
    """-inf for what may not be drawn."""
    if constraints.is_empty:
        return logits
    banned, allowed_rows, allowed = constraints
    logits = logits.clone()
    if banned is not None:
        logits[banned] = HIDDEN
    if allowed is not None:
        logits[allowed_rows] = logits[allowed_rows].masked_fill(~allowed, HIDDEN)
    return logits


def keep_top(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """scaled (n, vocab) with -inf outside of each row's top_k (n, 1; 0: all) and of the nucleus of top_p (n, 1) in it."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    ordered = ordered.masked_fill((rank >= top_k) & (top_k > 0), HIDDEN)
    weights = torch.softmax(ordered, -1, dtype=torch.float64)
    # A token stays while those before it hold less than top_p. Without the second condition rounding could drop
    # the last tokens of a row whose top_p is 1.
    outside = (weights.cumsum(-1) - weights >= top_p) & (top_p < 1)
    outside[:, 0] = False
    return torch.empty_like(scaled).scatter_(-1, order, ordered.masked_fill(outside, HIDDEN))


def draw(logits: Tensor, temperature: Tensor, blocks: BlockSums, numbers: Tensor) -> Tensor:
    """Tokens (n,) of softmax(logits (n, vocab) / temperature (n,)) by the inverse of its distribution function at numbers
    (n,), float64; blocks: `block_sums` of these. Rows without a distribution give any token.

    In two steps, blocks of tokens and the tokens of one: a running sum over the vocabulary is a few long rows, which a GPU
    takes milliseconds for.
    """
    largest = blocks.largest.amax(-1, keepdim=True)
    relative = ((blocks.largest - largest) / temperature[:, None]).exp()
    sums = blocks.sums.double() * relative
    block, number = _first_above(sums, numbers * sums.sum(-1))
    tokens = block[:, None] * BLOCK + torch.arange(BLOCK, device=logits.device)
    beyond, within = tokens >= logits.shape[1], tokens.clamp(max=logits.shape[1] - 1)
    scaled = (logits.gather(1, within).float() - largest) / temperature[:, None]
    weights = scaled.exp().masked_fill(beyond, 0)
    token, _ = _first_above(weights.double(), number)
    return (block * BLOCK + token).clamp(max=logits.shape[1] - 1)


def _first_above(weights: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of weights (n, m), float64, the first entry up to which the sum is above its number (n,), and what the number
    is above the sum of the entries before."""
    ends = weights.cumsum(-1)
    total = ends[:, -1]
    # Below the sum, so that the entry's own weight is above 0, however sums are rounded.
    numbers = torch.minimum(numbers, total.nextafter(torch.zeros_like(total)))
    entry = torch.searchsorted(ends, numbers[:, None], right=True)
    begin = F.pad(ends, (1, 0)).gather(1, entry)
    return entry[:, 0], numbers - begin[:, 0]
