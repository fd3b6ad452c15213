"""Faults of the compile backend."""

from __future__ import annotations

from tests.mutants.faults.fault import Fault
from tests.mutants.faults.runs import (
    CHECKPOINTS_OVER_RANKS,
    CONTEXTS_OF_BACKWARDS,
    DIFFERENT_RANKS,
    LOCAL_ATTENTION,
    TOKEN_MIXING,
    TORCH_SDPA,
    WRITTEN_FORMS,
)

_BACKEND = "torch_fdattn/compile_backend"
_DIST = "torch_fdattn/dist"
FAULTS = (
    Fault(
        "scores are written to whose older view is read later", f"{_BACKEND}/graph/functional.py",
        "        position[user] >= position[node]\n", "        position[user] < 0\n", WRITTEN_FORMS,
    ),
    Fault(
        "a write under no_grad has a gradient", f"{_BACKEND}/graph/functional.py",
        "if any(_sets_grad_mode(x) for x in _between(before[0], node)):", "if False:", WRITTEN_FORMS,
    ),
    Fault(
        "a temperature of each key is multiplied into q", f"{_BACKEND}/match/scores.py",
        "if self.frame.is_over_keys((label,), 0)", "if False", WRITTEN_FORMS,
    ),
    Fault(
        "keys of a head that all groups share are a group's", f"{_BACKEND}/match/roles.py",
        "((groups, inner), (groups, 1), (1, 1))", "((groups, inner), (groups, 1), (1, 1), (1, inner))", WRITTEN_FORMS,
    ),
    Fault(
        "ties of a maximum have a whole gradient", f"{_BACKEND}/masks/floors.py",
        "if not alone or floor.halves_ties:", "if not alone:", WRITTEN_FORMS,
    ),
    Fault(
        "attention that is written out stays", f"{_BACKEND}/torch_sdpa.py",
        "attention.form == sdpa.FORM and on_cpu", "on_cpu", TORCH_SDPA,
    ),
    Fault(
        "what a rank reads nothing of is not received again", f"{_DIST}/point_to_point.py",
        "    if not is_traced(x):\n", "    if given:\n", CHECKPOINTS_OVER_RANKS,
    ),
    Fault(
        "graphs of ranks are not compared", f"{_BACKEND}/context_parallel/agreement.py",
        "        check_equal_on_all_ranks(group_name, like, values)\n", "", DIFFERENT_RANKS,
    ),
    Fault(
        "slopes of each rank's own", f"{_DIST}/ring_attention/op.py",
        '            "alibi_slopes": alibi_slopes,\n            "sinks": sinks,\n            "attn_mask of',
        '            "sinks": sinks,\n            "attn_mask of', DIFFERENT_RANKS,
    ),
    Fault(
        "attention with a sink that is written out, of local tokens", f"{_DIST}/ring_attention/local_attention.py",
        "keys in (tokens, tokens + 1)", "keys == tokens", LOCAL_ATTENTION,
    ),
    Fault(
        "three-dimensional scores of local tokens", f"{_DIST}/ring_attention/local_attention.py",
        "scores.dim() >= 3:", "scores.dim() >= 4:", LOCAL_ATTENTION,
    ),
    Fault(
        "a checkpoint recomputed outside of its context", f"{_DIST}/ring_attention/checkpoints.py",
        "if seen != self.contexts:", "if len(seen) > len(self.contexts):", CONTEXTS_OF_BACKWARDS,
    ),
    Fault(
        "a convolution over local tokens", f"{_BACKEND}/context_parallel/mixing_operations.py",
        "kernel[x - first] != 1", "kernel[x - first] < 1", TOKEN_MIXING,
    ),
    Fault(
        "a scan over local tokens", f"{_BACKEND}/context_parallel/mixing_operations.py",
        "if numbers(given, rank) & dims", "if numbers(given, rank) == dims and len(dims) > 1", TOKEN_MIXING,
    ),
    Fault(
        "a mean over local tokens that comes back to them", f"{_BACKEND}/context_parallel/token_mixing.py",
        "        if info.dims:\n            self._refuse(", "        if False:\n            self._refuse(", TOKEN_MIXING,
    ),
    Fault(
        "positions counted from a rank's first token", f"{_BACKEND}/context_parallel/token_mixing.py",
        "meets and not self._may_begin(count.start)", "meets and False", TOKEN_MIXING,
    ),
)  # fmt: skip
