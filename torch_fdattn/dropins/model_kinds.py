"""Which masks a model of transformers can be given, by its configuration's class."""

from __future__ import annotations

import enum
import functools
import inspect
import sys

import torch


class ModelKind(enum.Enum):
    """What its code does with its masks."""

    HANDS_ON = "hands them on to its layers, as flash attention needs: what says the same as a mask will do"
    ASKS = "may calculate with boolean masks: has not run with flash attention, or forbids to leave them out (Doge)"
    EAGER = "has run with eager's additive masks alone, with which it may calculate (DeepSeek-V4)"


@torch.compiler.assume_constant_result  # or Dynamo would trace it
def kind_of(config_class: type) -> ModelKind:
    """Raises NotImplementedError for models that attend by themselves: they would add to their scores what is no
    mask of theirs, or go without the one that they rely on. transformers lets any model have any registered name.
    """
    return _kind_of(config_class)


@functools.cache
def _kind_of(config_class: type) -> ModelKind:
    import transformers

    models = _models(config_class)
    for one in models:
        if not one._can_set_attn_implementation():
            raise NotImplementedError(
                f'attn_implementation="fdattn": {one.__name__} of transformers {transformers.__version__} does '
                "not take its attention from AttentionInterface; use its own, or "
                'torch.compile(model, backend="fdattn")'
            )
    if models and not _supports(models, "sdpa", "flash_attn", "flex_attn"):
        return ModelKind.EAGER
    if (models and not _supports(models, "flash_attn")) or _asks_for_masks(config_class):
        return ModelKind.ASKS
    return ModelKind.HANDS_ON


def _supports(models: list[type], *names: str) -> bool:
    return any(getattr(one, f"_supports_{name}", True) for one in models for name in names)


def _models(config_class: type) -> list[type]:
    """The models of a configuration: transformers' list has one of most, the modelling file all that are its own."""
    import transformers

    listed = transformers.MODEL_MAPPING.get(config_class, None)
    if listed is not None:
        return [x for x in (listed if isinstance(listed, tuple) else (listed,)) if x is not None]
    for module in _modelling_files(config_class):
        found = [
            x for x in vars(module).values()
            if isinstance(x, type) and issubclass(x, transformers.PreTrainedModel)
            and x.__module__ == module.__name__ and getattr(x, "config_class", None) is config_class
        ]  # fmt: skip
        if found:
            return found
    return []


def _modelling_files(config_class: type) -> list:
    """Those that may have its models: the one of its configuration's name, then the others beside it (BLIP's text model)."""
    own = config_class.__module__.replace("configuration_", "modeling_")
    package = config_class.__module__.rpartition(".")[0]
    others = sorted(name for name in sys.modules if name.startswith(f"{package}.modeling_"))
    names = [own] if own != config_class.__module__ else []
    return [sys.modules[name] for name in (*names, *others) if name in sys.modules]


def _asks_for_masks(config_class: type) -> bool:
    modules = _modelling_files(config_class)[:1]
    try:
        return any("allow_is_causal_skip" in inspect.getsource(module) for module in modules)
    except OSError:  # no source: not to be wrong is worth a mask
        return True
