"""Faults in the serving engine, its server and its command line."""

from __future__ import annotations

from tests.mutants.faults.fault import Fault
from tests.mutants.faults.runs import (
    APPEND_DRAWN,
    CHAT,
    DECODE_CPU,
    GRAMMARS,
    REFUSALS,
    SERVER_ERRORS,
    STEP_TRACE,
    STOP_STRINGS,
    STREAMING,
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
        "_check_numbers_and_lengths(name, found)", "pass", GRAMMARS,
    ),
    Fault(
        "grammars: patterns in Lark's syntax meet uncounted", f"{_ENGINE}/grammar_limits.py",
        "intersections.add(found)", "pass", GRAMMARS,
    ),
    Fault(
        "grammars: patterns for one string uncounted", f"{_ENGINE}/schema_intersections.py",
        "(product := math.prod(sizes)) > MAX_PRODUCT", "(product := 1) > MAX_PRODUCT", GRAMMARS,
    ),
    Fault(
        "grammars: what allOf joins unseen", f"{_ENGINE}/schema_intersections.py",
        "todo = member, todo", "pass", GRAMMARS,
    ),
    Fault(
        "chat: a reply goes on", f"{_ENGINE}/streaming.py", "if should_stop():", "if False:", CHAT,
    ),
    Fault(
        "chat: turns beyond the pages", f"{_ENGINE}/chat.py",
        "min(self._llm.max_model_len, stored + 1)", "self._llm.max_model_len", CHAT,
    ),
    Fault(
        "streams: a token twice", f"{_ENGINE}/streaming.py",
        "completion.text[len(text) :], completion.text", "completion.text, completion.text", STREAMING,
    ),
    Fault(
        "streams: a step is left behind", f"{_ENGINE}/streaming.py",
        "while llm.has_unfinished:", "while False:", STREAMING,
    ),
    Fault(
        "streams: without running ahead it does", f"{_ENGINE}/llm.py",
        "if self._runs_ahead:", "if True:", STREAMING,
    ),
    Fault(
        "CPU: pages anywhere are taken for a run", "torch_fdattn/ops/decode/cpu.py",
        "if ids == list(range(ids[0], ids[0] + len(ids))):", "if ids[0] + len(ids) <= len(pages):", DECODE_CPU,
    ),
    Fault(
        "CPU: a token to a page that is not there", "torch_fdattn/ops/append_kv/reference.py",
        "if 0 <= page < call.k_cache.shape[0]:", "if page < call.k_cache.shape[0]:", APPEND_DRAWN,
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
