"""Faults of what is no kernel: references, CPU tensors, the framework's rules, prepared calls, merged linears."""

from __future__ import annotations

from tests.mutants.faults.fault import Fault
from tests.mutants.faults.runs import CPU, FRAMEWORK, INFERENCE, PREPARED, REFERENCE, SMALL_M

_KERNELS = "torch_fdattn/ops"
FAULTS = (
    Fault(
        "a prepared call's launches given all tensors in order", "torch_fdattn/launch/prepared.py",
        "[addresses[i] + offset for i, offset in places]", "addresses[: len(places)]", PREPARED,
    ),
    Fault(
        "a view by the beginning of what it lies in", "torch_fdattn/launch/prepared.py",
        "[addresses[i] + offset for i, offset in places]", "[addresses[i] for i, offset in places]", PREPARED,
    ),
    Fault(
        "a prepared call by other tiles", f"{_KERNELS}/attention/op.py",
        "if not q.is_cuda or tuning.state.active or q.dtype", "if not q.is_cuda or q.dtype", PREPARED,
    ),
    Fault(
        "reference: right window ignored", f"{_KERNELS}/positions.py",
        "seen = seen & (k_pos <= q_pos + mask.window_right)", "seen = seen & (k_pos <= k_pos)", REFERENCE,
    ),
    Fault(
        "CPU: a band without its first key", f"{_KERNELS}/attention/cpu_parts.py",
        "low = max(0, offset + start - left)", "low = max(0, offset + start - left + 1)", CPU,
    ),
    Fault(
        "CPU: causal from the first key wherever queries stand", f"{_KERNELS}/attention/cpu_parts.py",
        "and run.offset + rows.start + right == 0", "and run.offset + rows.start + right >= 0", CPU,
    ),
    Fault(
        "CPU: lengths of the first sequence alone", f"{_KERNELS}/attention/cpu_parts.py",
        "itertools.groupby(numbered)", "itertools.groupby(numbered, key=lambda _: 0)", CPU,
    ),
    Fault(
        "CPU: an lse of zero is of no keys", f"{_KERNELS}/attention/cpu.py",
        "lse.masked_fill(suspect & hidden,", "lse.masked_fill(suspect,", CPU,
    ),
    Fault(
        "CPU: the kernel is given an lse of -inf", f"{_KERNELS}/attention/cpu.py",
        'lse == float("-inf"), 0.0', "lse != lse, 0.0", CPU,
    ),
    Fault(
        "CPU: strided last dims", f"{_KERNELS}/attention/cpu.py",
        "made.append(x if apart else x.contiguous())", "made.append(x)", CPU,
    ),
    Fault(
        "reference: dS without delta", f"{_KERNELS}/attention/reference.py",
        "ds = p * (dp - delta_rows[..., None])", "ds = p * dp",
        REFERENCE,
    ),
    Fault(
        "raw ops differentiate silently", f"{_KERNELS}/library.py",
        "if torch.is_grad_enabled() and any(requires_grad(arg) for arg in given):", "if False:", FRAMEWORK,
    ),
    Fault(
        "fake outputs contiguous", f"{_KERNELS}/attention/op.py",
        "options)\n    return empty_state(q, v, options.dtype)",
        "options)\n    return empty_state(q.contiguous(), v, options.dtype)", FRAMEWORK,
    ),
    Fault(
        "SwiGLU by a kernel where it is differentiated", f"{_KERNELS}/swiglu.py",
        "is_compiling() or not can_call_kernel(gate, up) or not _fits", "is_compiling() or not _fits", INFERENCE,
    ),
    Fault(
        "a linear layer by a kernel where it is differentiated", f"{_KERNELS}/library.py",
        "is_autocast_enabled(x.device.type) and can_call_kernel(x, weight)", "is_autocast_enabled(x.device.type)", SMALL_M,
    ),
    Fault(
        "columns beyond the weight stored", f"{_KERNELS}/gemm/small_m_gemm.py",
        "mask=(rows < m)[:, None] & (columns < n)[None, :]", "mask=(rows < m)[:, None] & (columns >= 0)[None, :]", SMALL_M,
    ),
    Fault(
        "a norm of another tensor", "torch_fdattn/dist/tensor_parallel/fused_inference.py",
        "return added, normed", "return normed, added", INFERENCE,
    ),
    Fault(
        "merged weights that the model does not share", f"{_KERNELS}/merged_linear.py",
        "            parameter.data = part\n", "            part.data_ptr()\n", INFERENCE,
    ),
    Fault(
        "merged again at another place", f"{_KERNELS}/merged_linear.py",
        "    if adjacent is not None:\n", "    if False:\n", INFERENCE,
    ),
    Fault(
        "memory of processes merged", f"{_KERNELS}/merged_linear.py",
        'if any(x.device.type == "cpu" and x.is_shared() for x in parameters):', "if False:", INFERENCE,
    ),
    Fault(
        "the first tensor's map for all tensors", "torch_fdattn/launch/driver_launch.py",
        "if self._mapped[i] != addresses[index]:", "if not self._mapped[i]:", PREPARED,
    ),
    Fault(
        "strided lengths given for their copies", f"{_KERNELS}/attention/op.py",
        "if call is None or not all(x is None or x.is_contiguous() for x in tensors[:3]):", "if call is None:", PREPARED,
    ),
)  # fmt: skip
