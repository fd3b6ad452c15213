"""Last stage: compiles the rewritten graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from torch_fdattn.compile_backend.cache_key import CacheKey
from torch_fdattn.compile_backend.options import Options
from torch_fdattn.compile_backend.record import record
from torch_fdattn.compile_backend.tensor_parallel import passes


def lower(gm: GraphModule, inputs: list, own: Options, mode: str | None, others: dict) -> Any:
    """mode and others, Inductor's options, are as `torch.compile` takes them."""
    matmuls = passes.applies(own.tensor_parallel)
    if own.lower != "inductor":
        from torch._dynamo.backends import debugging

        compilers = {}
        if matmuls and own.lower == "aot_eager":
            compilers = passes.compilers(own.tensor_parallel, record, own.dryrun)
        return getattr(debugging, own.lower)(gm, inputs, **compilers)
    from torch._inductor.compile_fx import compile_fx

    # torch's own reading of mode and options, with its errors for unknown names.
    patches = torch._TorchCompileInductorWrapper(mode, others, None).config
    patches = {**patches, **CacheKey.patch(patches, own)}
    if matmuls:
        patches |= passes.MatmulPass.patch(patches, own, record)
    return compile_fx(gm, inputs, config_patches=patches)
