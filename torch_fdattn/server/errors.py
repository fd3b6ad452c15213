"""Errors in OpenAI's form: a message, a type, the field it is about, and a code.

Every error that a client can cause is an `APIError`; whatever else is raised is a 500 without its details,
which go to the log.
"""

from __future__ import annotations

import logging
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

log = logging.getLogger("torch_fdattn.server")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class APIError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: what was expected, what came, and the remedy.
        param: the request's field, as `messages[0].content`; None: no field is at fault.
        code: a word for programs, as OpenAI has them.
        headers: more headers of the answer.

    Examples:
        >>> from torch_fdattn.server.errors import APIError
        >>> APIError(400, "n must be at least 1, got 0", param="n").body()["error"]["param"]
        'n'
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        return _TYPES.get(self.status, fallback)

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        message, param = (
            _escaped(self.message),
            None if self.param is None else _escaped(self.param),
        )
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def _escaped(text: str) -> str:
    """What an error quotes of a request may have half of a surrogate pair, which has no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def internal_error(error: BaseException) -> APIError:
    """For what nobody expected: logged with its traceback, answered without."""
    log.error("an answer failed", exc_info=error)
    return APIError(500, "the server failed at this request; its log has the reason")


def install(app: FastAPI) -> None:
    """What a client causes, in this form; what nobody expected is the guard's (guard.py)."""

    @app.exception_handler(APIError)
    async def of_ours(request: Request, error: APIError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def of_validation(request: Request, error: RequestValidationError) -> JSONResponse:
        return validation_error(error.errors(), error.body).response()

    @app.exception_handler(HTTPException)
    async def of_routing(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code == 400:
            message = "the body must be JSON that can be read"
        return APIError(error.status_code, message, headers=error.headers).response()


def validation_error(errors: Sequence[Mapping[str, Any]], body: Any) -> APIError:
    """One of pydantic's errors, by its field: an unknown field before others, then the first field.

    Of a field of several types each has its error; the one that got the furthest says most.
    """
    errors = [_of_a_key(x, body) for x in errors]
    unknown = [x for x in errors if x["type"] == "extra_forbidden"]
    alike = [x for x in errors if x["loc"][:2] == errors[0]["loc"][:2]]
    first = unknown[0] if unknown else max(alike, key=_depth)
    param = field_name(first["loc"])
    name = param or "the body"
    kind, given = first["type"], reprlib.repr(first.get("input"))
    if isinstance(first.get("input"), bytes):
        return APIError(400, "the body must be JSON, with Content-Type: application/json")
    if kind == "json_invalid":
        return APIError(
            400, f"the body must be JSON: {first.get('ctx', {}).get('error', 'it cannot be read')}"
        )
    if kind == "extra_forbidden":
        name = param = _key_name(first["loc"])
        return APIError(
            400, f"{name} is no field that this server knows: take it out", param=param,
            code="unknown_parameter",
        )  # fmt: skip
    if kind == "missing":
        where = param or "the body"
        message = "the body must be a JSON object" if param is None else f"{where} must be given"
        return APIError(400, message, param=param, code="missing_required_parameter")
    expected = first["msg"][:1].lower() + first["msg"][1:]
    return APIError(400, f"{name}: {expected}, got {given}", param=param)


def _depth(error: Mapping[str, Any]) -> tuple[int, int]:
    *_, last = location = error["loc"]
    return len(location), last if isinstance(last, int) else 0


def _of_a_key(error: Mapping[str, Any], body: Any) -> Mapping[str, Any]:
    """A key with half of a surrogate pair is unknown like others: pydantic calls it a text that it cannot read, at the
    place of its object. A value of that kind has the same error at its own place.
    """
    if error["type"] != "string_unicode":
        return error
    for part in error["loc"][1:]:
        # Names of a union's members are in no body.
        if (isinstance(part, int) and isinstance(body, list)) or (
            isinstance(body, dict) and part in body
        ):
            body = body[part]
    if not isinstance(body, dict):
        return error
    return {**error, "type": "extra_forbidden", "loc": (*error["loc"], error["input"])}


def _key_name(location: Sequence[str | int]) -> str:
    """Of an unknown field, which may be called like one of pydantic's types."""
    *where, key = location
    name, key = field_name(where), str(key) or "''"
    return f"{name}.{key}" if name else key


def field_name(location: Sequence[str | int]) -> str | None:
    """`messages[0].content` from pydantic's location, whose names of a union's members are left out."""
    name = ""
    for part in location[1:]:  # the first is "body"
        if isinstance(part, int):
            name += f"[{part}]" if name else ""
        elif part in ("str", "int", "none", "nullable") or re.match(r"[A-Z]|\w+\[", part):
            continue
        else:
            name += f".{part}" if name else part
    return name or None
