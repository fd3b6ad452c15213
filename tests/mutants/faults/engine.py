"""Faults in the engine's steps: what speculation keeps, computes and draws, and what captured draws are taken for."""

from __future__ import annotations

from tests.mutants.faults.fault import Fault
from tests.mutants.faults.runs import DECODE_GRAPHS, SPECULATION

_ENGINE = "torch_fdattn/engine"

FAULTS = (
    Fault(
        "rejected proposals counted as computed", f"{_ENGINE}/requests.py",
        "self.num_computed -= len(drawn) - taken", "pass", SPECULATION,
    ),
    Fault(
        "draws behind a rejected proposal kept", f"{_ENGINE}/requests.py",
        "if self.finish_reason is not None or token != proposal:", "if self.finish_reason is not None:", SPECULATION,
    ),
    Fault(
        "queries at the end of the keys, padding or not", f"{_ENGINE}/runner.py",
        "torch.arange(queries, device=self._device), starts.int()",
        "torch.arange(queries, device=self._device), None", SPECULATION,
    ),
    Fault(
        "all draws of a sequence at its end", f"{_ENGINE}/runner.py",
        "positions = [position for _, position in draws]", "positions = [chunk.end for chunk, _ in draws]", SPECULATION,
    ),
    Fault(
        "proposals of the last step left in the rows", f"{_ENGINE}/sequence_rows.py",
        "self.tokens[at_rows, positions] = tokens", "pass", SPECULATION,
    ),
    Fault(
        "proposals beyond the last token", f"{_ENGINE}/scheduler.py",
        "limit = min(budget, sequence.max_length - sequence.length, capacity - chunk.end)",
        "limit = min(budget, capacity - chunk.end)", SPECULATION,
    ),
    Fault(
        "proposals that a grammar knows nothing of", f"{_ENGINE}/llm.py",
        "if self._speculation is not None and matcher is None:", "if self._speculation is not None:", SPECULATION,
    ),
    Fault(
        "min_tokens counted at a step's first draw", f"{_ENGINE}/step_constraints.py",
        "if position - sequence.prompt_length < sequence.params.min_tokens:",
        "if len(sequence.tokens) - sequence.prompt_length < sequence.params.min_tokens:", SPECULATION,
    ),
    Fault(
        "captured draws where one asks for more", f"{_ENGINE}/runner.py",
        "if found.draw is not None and needs.is_plain and constraints.is_empty:", "if found.draw is not None:", DECODE_GRAPHS,
    ),
    Fault(
        "captured draws that no row is told of", f"{_ENGINE}/runner.py",
        "self.rows.tokens[rows, lengths] = written", "pass", DECODE_GRAPHS,
    ),
)  # fmt: skip
