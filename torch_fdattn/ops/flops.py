"""FLOP formulas, for `torch.utils.flop_counter` and for the compiler's recomputation choices.

As torch counts its own attention: 2 matmuls forward, 5 backward, as many for tangents of q, k and v, masked pairs included, and no gradients but those
of q, k and v. Without a formula the partitioner would take attention for free and recompute it.
"""

from __future__ import annotations

import importlib.machinery
import sys
from math import prod

import torch

_COUNTER = "torch.utils.flop_counter"


def register() -> None:
    """Registers the formulas of all raw ops with torch's counter, now or as soon as it is imported.

    The counter imports Triton, which takes 0.2 s: most of what `import torch_fdattn` would cost.
    """
    if _COUNTER in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport:
    """An import hook that waits for torch's counter."""

    def find_spec(self, name, path=None, target=None):
        if name != _COUNTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module) -> None:
            execute(module)
            _register()
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        spec.loader.exec_module = exec_module
        return spec


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    ops = torch.ops.fdattn

    @register_flop_formula(
        [ops.attention_forward, ops.attention_fp8_forward, ops.decode_forward, ops.decode_out]
    )
    def forward_flops(q_shape, k_shape, v_shape, *args, **kwargs) -> int:
        return _pair_flops(q_shape, k_shape[2], q_shape[3] + v_shape[3])

    @register_flop_formula([ops.paged_decode_forward, ops.paged_decode_out])
    def paged_flops(q_shape, k_shape, v_shape, table_shape, *args, **kwargs) -> int:
        return _pair_flops(q_shape, table_shape[1] * k_shape[2], q_shape[3] + v_shape[3])

    @register_flop_formula([ops.attention_backward, ops.attention_backward_all])
    def backward_flops(dout_shape, dlse_shape, q_shape, k_shape, v_shape, *args, **kwargs) -> int:
        return _pair_flops(q_shape, k_shape[2], 3 * q_shape[3] + 2 * v_shape[3])

    @register_flop_formula(ops.attention_tangent)
    def tangent_flops(q_shape, k_shape, v_shape, *args, **kwargs) -> int:
        return _pair_flops(q_shape, k_shape[2], 3 * q_shape[3] + 2 * v_shape[3])

    # Lengths are on the device: counted is the bound that shapes give, all tokens in one sequence.
    @register_flop_formula(ops.varlen_attention_forward)
    def varlen_flops(q_shape, k_shape, v_shape, cu_q, cu_k, table_shape, *args, **kwargs) -> int:
        keys = k_shape[0] if table_shape is None else table_shape[1] * k_shape[2]
        return _pair_flops(_by_heads(q_shape), keys, q_shape[-1] + v_shape[-1])

    @register_flop_formula([ops.varlen_attention_backward, ops.varlen_attention_backward_all])
    def varlen_backward_flops(
        dout_shape, dlse_shape, q_shape, k_shape, v_shape, *args, **kwargs
    ) -> int:
        return _pair_flops(_by_heads(q_shape), k_shape[0], 3 * q_shape[-1] + 2 * v_shape[-1])

    @register_flop_formula(ops.varlen_attention_tangent)
    def varlen_tangent_flops(q_shape, k_shape, v_shape, *args, **kwargs) -> int:
        return _pair_flops(_by_heads(q_shape), k_shape[0], 3 * q_shape[-1] + 2 * v_shape[-1])

    @register_flop_formula(ops.merge_states_forward)
    def merge_flops(outs_shape, *args, **kwargs) -> int:
        return 2 * prod(outs_shape)

    @register_flop_formula(ops.merge_states_backward)
    def merge_backward_flops(dout_shape, dlse_shape, outs_shape, *args, **kwargs) -> int:
        return 4 * prod(outs_shape)

    @register_flop_formula(ops.merge_states_tangent)
    def merge_tangent_flops(outs_shape, *args, **kwargs) -> int:
        return 4 * prod(outs_shape)


def _by_heads(packed_shape) -> tuple[int, int, int, int]:
    tokens, heads, dim = packed_shape
    return 1, heads, tokens, dim


def _pair_flops(q_shape, kv_len: int, dims: int) -> int:
    """FLOPs of matmuls of `dims` multiplications in all for each (query, key) pair."""
    batch, heads, q_len, _ = q_shape
    return 2 * batch * heads * q_len * kv_len * dims
