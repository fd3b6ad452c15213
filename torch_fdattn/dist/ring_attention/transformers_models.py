"""Inside `context_parallel`: what the models of transformers whose forward runs a layer were given, read from their frames.

A layer is told neither which parameters its model has, nor what the model does behind its layers.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

#: What to do in place of `labels=`.
LABELS = (
    "shift the labels against the tokens before they are sharded, and compute the loss of the model's logits "
    "(labels = F.pad(labels, (0, 1), value=-100)[:, 1:], then shard_batch), or give the model these as shift_labels beside labels"
)


def model_that_embeds_no_positions(frame: types.FrameType | None) -> str | None:
    """The class of the innermost model whose forward runs this layer, where position_ids are none of its parameters.

    They then came with **kwargs, as those of the decoders of BART and its kin, which embed an arange. None of what is no
    model of transformers, and of a checkpoint's second run, where no model's forward is under way.
    """
    for model, code, _ in _forwards(frame):
        return None if "position_ids" in _parameters(code) else type(model).__name__
    return None


def fault_of_labels(frame: types.FrameType | None) -> str | None:
    """What is said of labels that transformers' loss of causal models is about to shift: within this rank's part."""
    loss_utils = sys.modules.get("transformers.loss.loss_utils")
    for model, code, given in _forwards(frame):
        # The name is looked for first: the property warns of models that have a loss of their own.
        if given.get("labels") is None or "loss_function" not in code.co_names:
            continue
        shifts = getattr(loss_utils, "ForCausalLMLoss", None)  # None of older versions
        if shifts is not None and _shifted(given) is None and model.loss_function is shifts:
            return f"{type(model).__name__} is given labels, which its loss shifts within a rank's part"
    return None


def _shifted(given: dict[str, object]) -> object:
    more = given.get("kwargs")
    return given.get("shift_labels", more.get("shift_labels") if isinstance(more, dict) else None)


def _forwards(
    frame: types.FrameType | None,
) -> Iterator[tuple[object, types.CodeType, dict[str, object]]]:
    """(model, code, what it was called with and has made) of each, from the innermost on."""
    hf = sys.modules.get("transformers.modeling_utils")
    while hf is not None and frame is not None:
        if frame.f_code.co_name == "forward":
            given = frame.f_locals
            if isinstance(given.get("self"), hf.PreTrainedModel):
                yield given["self"], frame.f_code, given
        frame = frame.f_back


def _parameters(code: types.CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
