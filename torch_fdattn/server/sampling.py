"""From a request's fields to the engine's `SamplingParams`, whose errors name the request's field."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from torch_fdattn.engine.sampling_params import SamplingParams
from torch_fdattn.server.errors import APIError
from torch_fdattn.server.schemas import ChatRequest, CompletionRequest, SamplingFields

#: Fields that are called alike on both sides.
_ALIKE = (
    "n", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "ignore_eos", "grammar",
)  # fmt: skip
#: What the engine's arguments are called in a chat request.
CHAT_NAMES = {"prompt": "messages", "json_schema": "response_format", "logprobs": "top_logprobs"}


def chat_params(request: ChatRequest, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
    """Of a chat request; without a limit of its own a reply may take what the context has."""
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise APIError(
            400, "max_tokens and max_completion_tokens say one thing: give one of them", param="max_tokens"
        )  # fmt: skip
    if request.top_logprobs is not None and not request.logprobs:
        raise APIError(400, "top_logprobs needs logprobs true", param="top_logprobs")
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    limit = getattr(request, name)
    names = {**CHAT_NAMES, "max_tokens": name}
    more = {
        "max_tokens": _max_tokens(name, limit, None, num_prompt_tokens, max_model_len),
        "json_schema": _json_schema(request),
    }
    if request.logprobs:
        more["logprobs"] = request.top_logprobs or 0
    return _params(request, more, names)


def completion_params(
    request: CompletionRequest, num_prompt_tokens: int, max_model_len: int
) -> SamplingParams:
    """Of a completion request; without a limit of its own it gets OpenAI's 16 tokens."""
    limit = _max_tokens("max_tokens", request.max_tokens, 16, num_prompt_tokens, max_model_len)
    more = {"max_tokens": limit, "logprobs": request.logprobs}
    return _params(request, more, {})


def _params(request: SamplingFields, more: dict[str, Any], names: dict[str, str]) -> SamplingParams:
    given = {name: getattr(request, name) for name in _ALIKE}
    if request.stop is not None:
        given["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(request.stop_token_ids)
    given = {name: value for name, value in (given | more).items() if value is not None}
    _check_min_tokens(request, given["max_tokens"], names.get("max_tokens", "max_tokens"))
    try:
        # What OpenAI's API draws by where nothing is said; every other default is the engine's.
        return SamplingParams(**{"temperature": 1.0} | given)
    except (ValueError, TypeError) as error:
        raise field_error(error, names) from None


def field_error(error: Exception, names: Mapping[str, str]) -> APIError:
    """A refusal of the engine's, which begins with its argument's name, as one of the request's field.

    names: from the engine's arguments to fields, where they differ.
    """
    text = str(error)
    name = re.match(r"\w*", text)[0]
    if name != "prompt" and name not in SamplingParams.__dataclass_fields__:
        return APIError(400, text)
    param = names.get(name, name)
    return APIError(400, param + text.removeprefix(name), param=param)


def _max_tokens(
    name: str, given: int | None, default: int | None, num_prompt_tokens: int, max_model_len: int
) -> int:
    budget = max_model_len - num_prompt_tokens
    if given is None:
        return budget if default is None else min(default, budget)
    if given > budget:
        raise APIError(
            400, f"{name} must be at most {budget}: the prompt has {num_prompt_tokens} tokens and the model's "
            f"context {max_model_len}, got {given}",
            param=name, code="context_length_exceeded",
        )  # fmt: skip
    return given


def _check_min_tokens(request: SamplingFields, limit: int, name: str) -> None:
    """As the engine does, whose error would name a field that the client may not have sent."""
    if request.min_tokens is None or not 1 <= limit < request.min_tokens:
        return
    given = getattr(request, name)
    limit_text = f"{name}, {limit}" if given is not None else f"{name}, which is {limit} where it is not given"  # fmt: skip
    raise APIError(400, f"min_tokens must be at most {limit_text}, got {request.min_tokens}", param="min_tokens")  # fmt: skip


def _json_schema(request: ChatRequest) -> str | None:
    form = request.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return json.dumps({"type": "object"})
    if form.json_schema is None:
        raise APIError(
            400, "response_format.json_schema must be given with type json_schema",
            param="response_format.json_schema",
        )  # fmt: skip
    try:
        # As short as the client has written it: the engine limits the text's length.
        return json.dumps(form.json_schema.schema_, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        raise APIError(
            400, "response_format.json_schema.schema is nested too deeply",
            param="response_format.json_schema.schema",
        ) from None  # fmt: skip
