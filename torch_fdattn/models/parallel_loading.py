"""A tensor-parallel model from a name or path, of which no rank ever holds more than its part and one layer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from torch_fdattn.dist.groups import Group
from torch_fdattn.models.loading import Checkpoint, Progress
from torch_fdattn.models.parallelize import replace_layers
from torch_fdattn.models.rope import Rotary
from torch_fdattn.models.transformer import Transformer


def load_parallel(
    name_or_path: str | Path, mesh: Group, *, strategy: str = "auto", allreduce_method: str = "auto",
    linear_strategy: str = "auto", fused: bool = False, dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu", progress: Progress | None = None,
) -> Transformer:  # fmt: skip
    """`load_model`, then `parallelize`, a layer at a time: the same model without holding all of it.

    Every rank reads each layer from the files (which a host reads from its disk once), keeps its slices and forgets the
    rest before it reads the next one. Embedding, norms and a tied head are held by every rank.

    Args:
        name_or_path, dtype, device, progress: as `load_model`; bytes are counted as read, before they are sliced.
        mesh, strategy, allreduce_method, linear_strategy, fused: as `parallelize`.

    Returns:
        The parallel model in evaluation mode, its parameters not requiring gradients.

    Raises:
        ModelError: as `load_model`.
        ValueError, TypeError, NotImplementedError: as `parallelize`, before any weight is read.

    Examples:
        >>> mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        >>> model = torch_fdattn.models.load_parallel("smollm2", mesh, dtype=torch.bfloat16)
        >>> model(torch.ones(1, 4, dtype=torch.long)).shape  # the same on all ranks
        torch.Size([1, 4, 49152])
    """
    checkpoint = Checkpoint.open(name_or_path, dtype, device)
    model = checkpoint.empty_model()
    fill = checkpoint.filling(model, progress)

    def materialise(module: nn.Module, name: str) -> None:
        for leaf, parameter in list(module.named_parameters()):
            fill(f"{name}.{leaf}", parameter)

    replace_layers(
        model, mesh, strategy, allreduce_method, linear_strategy, fused, before=materialise
    )
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            fill(name, parameter)
    model.rotary = Rotary(checkpoint.config).to(device)
    return model.eval()
