"""Arguments that layers of transformers hand to their attention, and that ours does not know."""

from __future__ import annotations

from typing import Any

#: With these some models (DeepSeek-V3.2, MiniMax M3, Inkling 2) say what their mask does not.
_CHOOSE_KEYS = ("indices", "block_indices", "sinks")


def refuse_unknown(arguments: dict[str, Any]) -> None:
    """Raises NotImplementedError for what would be lost."""
    for name in _CHOOSE_KEYS:
        if arguments.get(name) is not None:
            raise NotImplementedError(
                f'attn_implementation="fdattn" does not know {name} (keys that a layer chooses, or its own '
                'sinks), which would be lost: use attn_implementation="eager" for this model'
            )
