"""The ASGI application: routes, each a line or two over what it asks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from torch_fdattn.server import errors
from torch_fdattn.server.chat import make_chat
from torch_fdattn.server.completions import make_completion
from torch_fdattn.server.conversation import read_conversation
from torch_fdattn.server.engine_protocol import AsyncEngine
from torch_fdattn.server.errors import APIError
from torch_fdattn.server.events import event_answer, json_answer
from torch_fdattn.server.guard import Guard
from torch_fdattn.server.options import ServerOptions
from torch_fdattn.server.schemas import ChatRequest, CompletionRequest, TokenizeRequest
from torch_fdattn.server.service import DEAD, Service
from torch_fdattn.version import __version__

#: The page takes nothing from elsewhere, and is shown in no other page.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def make_app(engine: AsyncEngine, options: ServerOptions) -> FastAPI:
    """The application over an engine, which the caller closes; `app.state.service` is its `Service`.

    Examples:
        >>> from torch_fdattn.server import ServerOptions
        >>> from torch_fdattn.server.app import make_app
        >>> config = torch_fdattn.models.ModelConfig("qwen3", 64, 32, 48, 1, 4, 2, 16, 128)
        >>> llm = torch_fdattn.engine.LLM(torch_fdattn.models.Transformer(config), pages=16)
        >>> app = make_app(torch_fdattn.engine.AsyncLLM(llm), ServerOptions(model_name="tiny"))
        >>> app.state.service.max_model_len
        128
    """
    # The pages for its OpenAPI would load scripts from elsewhere.
    app = FastAPI(title="torch_fdattn", version=__version__, docs_url=None, redoc_url=None)
    service = app.state.service = Service(engine, options)
    errors.install(app)
    app.add_middleware(Guard, service=service)
    created = int(time.time())
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        chat = await make_chat(body, service)
        if body.stream:
            return await event_answer(request, chat.chunks())
        return await json_answer(request, chat.answer())

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        completion = await make_completion(body, service)
        if body.stream:
            return await event_answer(request, completion.chunks())
        return await json_answer(request, completion.answer())

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model_card()

    def model_card() -> dict[str, Any]:
        return {
            "id": options.model_name,
            "object": "model",
            "created": created,
            "owned_by": "torch_fdattn",
            "max_model_len": service.max_model_len,
        }

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise APIError(400, "one of prompt and messages must be given", param="prompt")
        if body.messages is not None:
            if body.add_special_tokens:
                raise APIError(
                    400, "add_special_tokens is for prompt: a chat template writes them itself",
                    param="add_special_tokens",
                )  # fmt: skip
            conversation = await read_conversation(service.tokenizer, body.messages)
            text = conversation.prompt
            ids = await service.encode(text, "messages", add_special_tokens=False)
        else:
            ids = await service.encode(body.prompt, "prompt", body.add_special_tokens is not False)
        return {"tokens": ids, "count": len(ids), "max_model_len": service.max_model_len}

    @app.get("/health")
    async def health() -> JSONResponse:
        if service.is_draining or service.stats() is None:
            raise APIError(503, "the server ends" if service.is_draining else DEAD)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/", include_in_schema=False)
    async def index() -> HTMLResponse:
        return HTMLResponse(page, headers=_PAGE_HEADERS)

    return app
