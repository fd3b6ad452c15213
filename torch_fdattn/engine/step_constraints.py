"""From the sequences of a step to what their next tokens may not be."""

from __future__ import annotations

import torch

from torch_fdattn.engine.sampler import Constraints
from torch_fdattn.engine.scheduler import ScheduledStep
from torch_fdattn.engine.sequence_rows import to_device


def constraints_of(step: ScheduledStep, device: torch.device) -> Constraints:
    """For the draws of the step's chunks, decodes first: no end token before min_tokens, unless a grammar leaves nothing
    else, and what a grammar allows."""
    rows, tokens, allowed_rows, allowed = [], [], [], []
    chunks = (*step.decodes, *step.prefills)
    draws = [(chunk.sequence, at) for chunk in chunks for at in chunk.draw_positions]
    for i, (sequence, position) in enumerate(draws):
        banned: list[int] = []
        if position - sequence.prompt_length < sequence.params.min_tokens:
            banned = sequence.request.banned_ids
        if sequence.matcher is not None:
            allowed_rows.append(i)
            allowed.append(sequence.matcher.allowed())
            if allowed[-1].sum() == allowed[-1][banned].sum():
                banned = []
        rows += [i] * len(banned)
        tokens += banned
    if not rows and not allowed:
        return Constraints()
    at_rows, at_tokens, at_allowed = to_device([rows, tokens, allowed_rows], device)
    return Constraints(
        (at_rows, at_tokens) if rows else None,
        at_allowed if allowed else None,
        torch.stack(allowed).to(device) if allowed else None,
    )
