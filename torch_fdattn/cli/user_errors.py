"""What a user's function raises, as one line: where, in which function, and what."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator

import torch

from torch_fdattn.cli.errors import UsageError

#: Where files are not the user's.
_OTHERS = (
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
    os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep, "<",
)  # fmt: skip
#: The rest of a function behind a graph break, as Dynamo names it.
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.*)_at_\d+")


@contextlib.contextmanager
def one_line_of(target: str) -> Iterator[None]:
    """In place of what the user's code raises, a `UsageError` that says where; what the backend raises stays."""
    log = logging.getLogger("torch._subclasses.fake_tensor")  # shows a traceback of its own
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if _is_ours(error):
            raise
        raise UsageError(f"{target}: {_said(error)}") from None
    finally:
        log.setLevel(level)


def _is_ours(error: Exception) -> bool:
    from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError

    return isinstance(error, BackendCompilerFailed | InternalTorchDynamoError)


def _said(error: Exception) -> str:
    frame, cause = _frame(error), error
    if hasattr(
        error, "real_stack"
    ):  # of Dynamo, which raises it in place of what came while it traced
        while before := cause.__cause__ or cause.__context__:
            cause = before
    what = f"{type(cause).__name__}: {cause}".removesuffix(": ")
    if isinstance(cause, SyntaxError):
        return f"{cause.filename}:{cause.lineno}: {type(cause).__name__}: {cause.msg}"
    if frame is None:
        return what
    name = _RESUMED.sub(r"\1", frame.name)
    file = frame.filename.removeprefix(os.getcwd() + os.sep)
    return f"{file}:{frame.lineno}, in {name}: {what}"


def _frame(error: Exception) -> traceback.FrameSummary | None:
    """The innermost line of the user's that was running."""
    stack = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
    users = [x for x in stack if not x.filename.startswith(_OTHERS)]
    return users[-1] if users else None
