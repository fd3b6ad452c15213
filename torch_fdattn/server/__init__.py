"""An HTTP server in OpenAI's form over the engine, its page, and the benchmark of serving.

`options.py` says what can be chosen; `app.make_app` builds the ASGI application and `run.serve` runs it.
Both need the packages of the extra `serve`; nothing else of torch_fdattn does.
"""

from torch_fdattn.server.options import ServerOptions

__all__ = ["ServerOptions"]
