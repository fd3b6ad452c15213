"""Log-probabilities in the two forms of OpenAI's API.

JSON has no infinity: a token that cannot be drawn has -9999.0, as OpenAI gives it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch_fdattn.engine.outputs import Logprob

_IMPOSSIBLE = -9999.0
#: (token id, what the engine has of its place, by token id)
Place = tuple[int, Mapping[int, Logprob]]


def chat_logprobs(places: Sequence[Place], top: int) -> dict[str, Any]:
    """A choice's `logprobs`: each token with its `top` alternatives, the likeliest first."""
    return {
        "content": [
            {
                **_token(candidates[token_id]),
                "top_logprobs": [_token(x) for x in _likeliest(candidates, top)],
            }
            for token_id, candidates in places
        ],
        "refusal": None,
    }


def completion_logprobs(places: Sequence[Place], top: int, text_offset: int) -> dict[str, Any]:
    """The older form, in four lists; text_offset: characters of the reply before these tokens."""
    tokens, offsets = [candidates[token_id] for token_id, candidates in places], []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [
            {x.text: _finite(x.logprob) for x in _likeliest(candidates, top)}
            for _, candidates in places
        ],
        "text_offset": offsets,
    }


def _likeliest(candidates: Mapping[int, Logprob], top: int) -> list[Logprob]:
    return sorted(candidates.values(), key=lambda x: -_finite(x.logprob))[:top]


def _token(token: Logprob) -> dict[str, Any]:
    # A token may end within a character; its bytes are not known then.
    is_broken = "\ufffd" in token.text
    return {
        "token": token.text,
        "logprob": _finite(token.logprob),
        "bytes": None if is_broken else list(token.text.encode()),
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE
