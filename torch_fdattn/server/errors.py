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
        # A message may quote what came: half of a surrogate pair has no UTF-8.
        message = self.message.encode("utf-8", "replace").decode()
        param = None if self.param is None else self.param.encode("utf-8", "replace").decode()
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


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
        return validation_error(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def of_routing(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code == 400:
            message = "the body must be JSON that can be read"
        return APIError(error.status_code, message, headers=error.headers).response()


def validation_error(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """One of pydantic's errors, by its field: an unknown field before others, then the first field.

    Of a field of several types each has its error; the one that got the furthest says most.
    """
    unknown = [x for x in errors if x["type"] == "extra_forbidden"]
    alike = [x for x in errors if x["loc"][:2] == errors[0]["loc"][:2]]
    first = unknown[0] if unknown else max(alike, key=lambda x: len(x["loc"]))
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
