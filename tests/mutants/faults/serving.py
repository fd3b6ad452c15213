"""Faults in the serving engine, its server and its command line."""

from __future__ import annotations

from tests.mutants.faults.fault import Fault
from tests.mutants.faults.runs import (
    CHAT,
    GRAMMARS,
    REFUSALS,
    SERVER_ERRORS,
    STEP_TRACE,
    STOP_STRINGS,
)

_ENGINE = "torch_fdattn/engine"
FAULTS = (
    Fault(
        "aborted: text held back is lost", f"{_ENGINE}/llm.py",
        'sequence.finish("abort")', 'sequence.finish_reason = "abort"', STOP_STRINGS,
    ),
    Fault(
        "grammars: llguidance's own limits", f"{_ENGINE}/structured.py",
        "verbose_errors=False, **_LIMITS", "verbose_errors=False", GRAMMARS,
    ),
    Fault(
        "grammars: one that fails has stopped", f"{_ENGINE}/requests.py",
        'self.finish("stop" if self.error is None else "error")', 'self.finish("stop")', GRAMMARS,
    ),
    Fault(
        "grammars: completions of a request share a matcher", f"{_ENGINE}/llm.py",
        "None if grammar is None else grammar.copy()", "grammar", GRAMMARS,
    ),
    Fault(
        "grammars: each multipleOf for itself", f"{_ENGINE}/grammar_limits.py",
        "multiple = math.lcm(multiple, ", "multiple = math.lcm(1, ", GRAMMARS,
    ),
    Fault(
        "grammars: schemas in Lark's syntax unread", f"{_ENGINE}/grammar_limits.py",
        "check_schema(name, found)", "pass", GRAMMARS,
    ),
    Fault(
        "chat: a reply goes on", f"{_ENGINE}/chat.py", "if should_stop():", "if False:", CHAT,
    ),
    Fault(
        "trace: the MLP's time is the norms'", f"{_ENGINE}/step_trace.py",
        'before(block.mlp, "mlp")', 'before(block.mlp, "norm")', STEP_TRACE,
    ),
    Fault(
        "trace: hooks stay", f"{_ENGINE}/step_trace.py", "hook.remove()", "pass", STEP_TRACE,
    ),
    Fault(
        "server: a grammar's failure is an answer", "torch_fdattn/server/service.py",
        'completion.finish_reason == "error"', "False", SERVER_ERRORS,
    ),
    Fault(
        "server: messages by chat_template_kwargs", "torch_fdattn/server/conversation.py",
        "if name in reserved:", "if False:", REFUSALS,
    ),
    Fault(
        "server: any name in chat_template_kwargs", "torch_fdattn/server/conversation.py",
        "if name not in free:", "if False:", REFUSALS,
    ),
)  # fmt: skip
