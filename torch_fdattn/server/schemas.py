"""The bodies of requests, in OpenAI's form. A field that is not here is refused by its name.

Types are strict: "1" is no number. What values a field may have is said where it is used, in
`engine.SamplingParams` above all. null is what an absent field is.

Source: https://platform.openai.com/docs/api-reference/chat and …/completions. Fields beyond theirs have
the names of vLLM's server.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

T = TypeVar("T")


class _FirstError:
    """A list of which the first element that is wrong is the error: pydantic keeps some KiB for each, and a body may have
    a million. Its own FailFast does not stand in a union: it has no hash."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return handler(source) | {"fail_fast": True}


Array = Annotated[list[T], _FirstError()]


class _Body(BaseModel):
    # Names such as model_… are fields like any other.
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _with_one_unknown_field(cls, given: Any) -> Any:
        """The first unknown field is what an error says, too."""
        if not isinstance(given, dict):
            return given
        names = {field.alias or name for name, field in cls.model_fields.items()}
        known = {name: given[name] for name in names if name in given}
        unknown = next((name for name in given if name not in names), None)
        return known if len(known) == len(given) else known | {unknown: given[unknown]}


class StreamOptions(_Body):
    include_usage: bool | None = None


class SamplingFields(_Body):
    """What both kinds of completion have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | Array[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    user: str | None = Field(None, description="Not looked at.")
    # Beyond OpenAI's.
    min_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Array[int] | None = None
    ignore_eos: bool | None = None
    grammar: str | None = None


class CompletionRequest(SamplingFields):
    prompt: str | Array[str] | Array[int] | Array[Array[int]]
    logprobs: int | None = None


class TextPart(_Body):
    type: Literal["text"]
    text: str


class FunctionCall(_Body):
    name: str
    arguments: str = Field(description="JSON, as text.")


class ToolCall(_Body):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Array[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Array[ToolCall] | None = None
    tool_call_id: str | None = None
    # What OpenAI's clients send back of an answer, without a value.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None


class Function(_Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    type: Literal["function"]
    function: Function


class JSONSchema(_Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class ChatRequest(SamplingFields):
    messages: Array[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Array[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, as enable_thinking."
    )


class TokenizeRequest(_Body):
    model: str | None = None
    prompt: str | None = None
    messages: Array[ChatMessage] | None = None
    add_special_tokens: bool | None = None
