"""Proposals for a sequence's next tokens: those that followed its last tokens when it had them before ("prompt lookup").

A step computes the last token and the proposals behind it in one pass, and draws a token at each of these positions
as it would have been drawn there one step at a time: by the logits there, and by random numbers that depend on the
seed and the token's index alone. As long as a proposal is what was drawn before it, the next draw holds; the first
draw that differs from its proposal holds too, and those behind it are dropped. So proposals decide how many tokens a
step gives, and never which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_fdattn.ops.decode.inputs import MAX_QUERY_TOKENS

#: Token ids that a `NgramProposer` takes are below this: it keeps them as code points.
MAX_VOCAB_SIZE = 0x110000


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramSpeculation:
    """`LLM`'s speculation by n-grams: several tokens a step for sequences that repeat their prompt or themselves.

    Tokens, log-probabilities and ends are those without speculation, greedy or drawn, with penalties too, as far as
    logits are the same: they come from products of other shapes, which may round otherwise. Requests with a grammar
    do not speculate. What it costs: the host reads a step's tokens before it schedules the next one, also where
    nothing is proposed; and a step with proposals computes up to 1 + max_tokens tokens for each sequence that decodes.

    Args:
        max_tokens: proposed to a sequence in a step, from 1 to 15: decode takes 16 tokens of a sequence.
        longest, shortest: tokens of the n-grams that are looked for. The longest one that the sequence had before
            decides, where it stood last.
        max_sequences: steps in which more sequences decode propose nothing, since they have enough to compute.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.

    Source: LLMA, arXiv:2304.04487; the lookup is that of prompt lookup decoding (A. Saxena, 2023).

    Examples:
        >>> config = torch_fdattn.models.ModelConfig("qwen3", 64, 32, 48, 1, 4, 2, 16, 128)
        >>> speculation = torch_fdattn.engine.NgramSpeculation(max_tokens=5)
        >>> llm = torch_fdattn.engine.LLM(
        ...     torch_fdattn.models.Transformer(config), pages=16, speculation=speculation
        ... )
        >>> params = torch_fdattn.engine.SamplingParams(max_tokens=8, temperature=0)
        >>> len(llm.generate([[5, 9, 33, 5, 9, 33]], params)[0].outputs[0].token_ids)
        8
        >>> llm.stats().accepted_tokens <= llm.stats().proposed_tokens
        True
    """

    max_tokens: int = 7
    longest: int = 4
    shortest: int = 2
    max_sequences: int = 32

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_tokens", 1, MAX_QUERY_TOKENS - 1), ("shortest", 1, None),
            ("longest", self.shortest, None), ("max_sequences", 1, None),
        ):  # fmt: skip
            value = getattr(self, name)
            if type(value) is not int:
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < low or (high is not None and value > high):
                limits = f"at least {low}" if high is None else f"from {low} to {high}"
                raise ValueError(f"{name} must be {limits}, got {value}")


class NgramProposer:
    """Proposes the next tokens of one sequence, whose tokens grow from call to call.

    The tokens are kept as a string of code points, which is searched in C.
    """

    def __init__(self, speculation: NgramSpeculation) -> None:
        self._speculation, self._text = speculation, ""

    def propose(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        """min(limit, max_tokens) tokens, or none where no n-gram occurs twice. What follows an n-gram may reach the end
        of the tokens: then it goes on as if they were repeated."""
        speculation, limit = self._speculation, min(limit, self._speculation.max_tokens)
        if limit < 1:
            return ()
        text = self._text = self._text + "".join(map(chr, tokens[len(self._text) :]))
        start, end = None, len(text) - 1  # before the end: the n-gram itself does not count
        for n in range(speculation.shortest, speculation.longest + 1):
            # Where n + 1 tokens stood, the last n of them did.
            at = text.rfind(text[-n:], 0, end)
            if at < 0:
                break
            start = end = at + n
        if start is None:
            return ()
        period = len(text) - start
        return tuple(tokens[start + i % period] for i in range(limit))
