"""The op library `fdattn`: where schemas are defined, and how a call finds its kernel.

Each raw op has one Python function for CPU and CUDA tensors, which chooses between the Triton kernel
and the readable reference, and one fake. Differentiable ops are composites over raw ops (see
`ops/attention/op.py`), so that compiled graphs hold the raw ops.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C import _dispatch_tls_local_include_set as _included_keys
from torch._C import _get_tracing_state, _is_any_autocast_enabled, _len_torch_function_stack
from torch._C._autograd import _profiler_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from torch_fdattn.environment import INTERPRET
from torch_fdattn.ops.layout import from_bhsd, to_bhsd

#: Where the ops are registered: `torch.ops.fdattn`. `tools/hub_kernel.py` gives each copy a name of its own.
NAMESPACE = "fdattn"
library = torch.library.Library(NAMESPACE, "DEF")

#: How often each launch path ran, e.g. ``launches["decode_forward/triton"]``. Tests read it to know
#: which kernel they tested.
launches: Counter[str] = Counter()

# Inductor must hand our kernels the strides that the fake promised.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def use_triton(tensor: Tensor) -> bool:
    """Whether a call on this tensor runs the Triton kernels, or else the reference."""
    if tensor.is_cuda:
        if tensor.dtype == torch.float64:
            raise NotImplementedError("float64 runs on the CPU reference only, got CUDA tensors")
        return True
    if not INTERPRET or tensor.dtype == torch.float64:
        return False
    if tensor.dtype == torch.bfloat16:
        raise NotImplementedError(
            "bfloat16 is wrong in Triton's interpreter; with TRITON_INTERPRET=1 use float16 or float32"
        )
    return True


_MODES = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
for _key in ("PythonDispatcher", "PythonTLSSnapshot", "FuncTorchDynamicLayerFrontMode"):
    _MODES = _MODES | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key))
_MODES = _MODES.raw_repr() & ~torch._C.DispatchKeySet(torch._C.DispatchKey.CPU).raw_repr()


def is_watched() -> bool:
    """Whether a mode, a functorch transform, forward-mode differentiation or a tracer is active."""
    return bool(_len_torch_function_stack()) or ops_are_watched()


def ops_are_watched() -> bool:
    """As `is_watched`, but for modes that see torch's functions alone."""
    return bool(
        _included_keys().raw_repr() & _MODES
        or forward_ad._current_level >= 0
        or _get_tracing_state() is not None
    )


def can_call_kernel(*tensors: Tensor | None) -> bool:
    """Whether nobody is between a caller and the kernel: no tracing, mode, subclass or derivative.

    Then an op's kernel may be called without the dispatcher, which costs a Python op 5 µs and more. The first of the
    tensors is none that may be None.
    """
    if is_watched():
        return False
    grad = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        kind = type(tensor)
        # Negative: a lazy minus sign, which the dispatcher carries out.
        if (
            (kind is not Tensor and kind is not Parameter)
            or (grad and tensor.requires_grad)
            or tensor.is_neg()
        ):
            return False
    return tensors[0].is_cuda or tensors[0].is_cpu


def can_bypass_torch(x: Tensor, weight: Tensor) -> bool:
    """Whether no gradient, mode or autocast needs torch's own product of these."""
    return not torch.is_autocast_enabled(x.device.type) and can_call_kernel(x, weight)


def lie_in_memory(*arguments: object) -> bool:
    """Whether kernels may read the tensors among these as they are: no subclass, no lazy minus sign."""
    return all(
        not isinstance(x, Tensor) or (type(x) in (Tensor, Parameter) and not x.is_neg())
        for x in arguments
    )


def can_bypass_dispatcher(first: Tensor, *others: Tensor | None) -> bool:
    """Whether a Python entry may call an op's kernel itself: nobody would see the op, nothing is derived.

    False also for what is no tensor, so that such a call meets the checks of its types.
    """
    if is_compiling() or _is_any_autocast_enabled() or _profiler_enabled() or first is None:
        return False
    return can_call_kernel(first, *others)


def define_raw(schema: str, kernel: Callable, fake: Callable, seeded: bool = False) -> None:
    """Defines a raw op: one kernel for CPU and CUDA, its fake, and an Autograd kernel that refuses.

    Without the refusal autograd would differentiate straight through the CPU reference, and on CUDA
    return outputs silently cut off from the graph; forward mode would lose its tangents everywhere.
    """
    name = schema[: schema.index("(")]
    drawing = (
        torch.Tag.nondeterministic_seeded,
    ) * seeded  # compilers must neither merge nor repeat it
    library.define(schema, tags=(*_TAGS, *drawing))
    library.impl(name, without_autocast(kernel), "CPU")
    library.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)

    overload = getattr(torch.ops.fdattn, name).default
    advice = (
        "is a raw op and not differentiable; call the op without _forward/_backward in its name "
        "(torch.ops.fdattn.attention, decode, merge_states)"
    )
    beneath = torch._C._AutoDispatchBelowAutograd
    written = _written(overload)
    if written:
        advice = (
            "writes into its arguments and is not differentiable; call it under torch.no_grad()"
        )
        beneath = torch._C._AutoDispatchBelowADInplaceOrView

    def refuse_autograd(*args, **kwargs):
        given = (*args, *kwargs.values()) if kwargs else args
        if torch.is_grad_enabled() and any(requires_grad(arg) for arg in given):
            raise NotImplementedError(f"torch.ops.fdattn.{name} {advice}")
        # The level is private to torch, but reading it costs 30 ns and unpacking every tensor does not.
        if forward_ad._current_level >= 0 and any(has_tangent(arg) for arg in given):
            raise NotImplementedError(
                f"torch.ops.fdattn.{name} has no forward-mode derivative (torch.func.jvp, "
                "torch.autograd.forward_ad); attention, varlen_attention, decode and merge_states have one"
            )
        if written:
            load_rules_for(args[0])
            _bump_versions(args, kwargs, written)
        with beneath():
            return overload(*args, **kwargs)

    library.impl(name, refuse_autograd, "Autograd")
    if not written:
        return

    def bump_versions(*args, **kwargs):
        _bump_versions(args, kwargs, written)
        with beneath():
            return overload(*args, **kwargs)

    # Inference mode goes past Autograd, and there too a tensor that is no inference tensor has a version.
    library.impl(name, bump_versions, "ADInplaceOrView")

    def carry_out_signs(*args, **kwargs):
        given = [x.resolve_neg() if isinstance(x, Tensor) else x for x in (*args, *kwargs.values())]
        called = given[: len(args)], dict(zip(kwargs, given[len(args) :], strict=True))
        overload(*called[0], **called[1])
        for before, after in zip(_at(args, kwargs, written), _at(*called, written), strict=True):
            if before is not None and before.is_neg():
                before.copy_(after)

    # torch's own way for this fails where an optional tensor that would be written to is missing.
    library.impl(name, carry_out_signs, "Negative")


def without_autocast(function: Callable) -> Callable:
    """`function` of CPU tensors, whose torch ops autocast would else compute in its own dtype."""

    @functools.wraps(function)
    def guarded(*args, **kwargs):
        if not torch.is_autocast_enabled("cpu"):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return guarded


def _written(overload: torch._ops.OpOverload) -> tuple[int | str, ...]:
    """The arguments that an op mutates: positions, and names of those that have no position."""
    return tuple(
        x.name if x.kwarg_only else i
        for i, x in enumerate(overload._schema.arguments)
        if x.alias_info is not None and x.alias_info.is_write
    )


def _bump_versions(args: tuple, kwargs: dict, written: tuple[int | str, ...]) -> None:
    """Tells autograd that these were written to, as torch's own in-place ops do of themselves."""
    found = _at(args, kwargs, written)
    torch.autograd.graph.increment_version([x for x in found if x is not None])


def _at(args: Sequence, kwargs: dict, written: tuple[int | str, ...]) -> list[Tensor | None]:
    """A call's arguments at these places, None where it has none there."""
    return [
        kwargs.get(at) if isinstance(at, str) else args[at] if at < len(args) else None
        for at in written
    ]


def _taking_layout(function: Callable, names: tuple[str, ...]) -> Callable:
    """`function` with a keyword `layout`, of its first arguments, which have these names, and of out."""

    def in_layout(*args, layout="bhsd", **options):
        if layout == "bhsd":
            return function(*args, **options)
        views = to_bhsd(layout, **dict(zip(names, args, strict=False)))
        return from_bhsd(function(*views, *args[len(names) :], **options))

    return in_layout


def define_composite(
    schema: str, function: Callable, autocast_args: int, in_layout: tuple[str, ...] = ()
) -> None:
    """Defines a differentiable op as a composite, with autocast for its first `autocast_args` tensors.

    in_layout: of an op that returns (out, lse) and takes a layout, its first arguments, whose dims it orders.

    `torch.library.register_autocast` would cast every floating-point input, lse included.
    """
    name = schema[: schema.index("(")]
    if in_layout:
        function = _taking_layout(function, in_layout)
    library.define(schema, tags=_TAGS)
    library.impl(name, function, "CompositeImplicitAutograd")

    def transformed(first, *args, **kwargs):
        args = first, *args
        if autocast_args and torch.is_autocast_enabled(first.device.type):
            dtype = torch.get_autocast_dtype(first.device.type)
            args = [_autocast(x, dtype) for x in args[:autocast_args]] + [*args[autocast_args:]]
        return function(*args, **kwargs)

    # torch.func's own treatment of a composite runs it within a transform, where no autograd.Function can be called.
    library.impl(name, transformed, "FuncTorchDynamicLayerFrontMode")
    if not autocast_args:
        return
    overload = getattr(torch.ops.fdattn, name).default

    def autocast(device_type: str, key: torch._C.DispatchKey) -> Callable:
        keys = torch._C.DispatchKeySet(key)

        def kernel(*args, **kwargs):
            dtype = torch.get_autocast_dtype(device_type)
            cast = [_autocast(arg, dtype) for arg in args[:autocast_args]]
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return overload(*cast, *args[autocast_args:], **kwargs)

        return kernel

    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        library.impl(name, autocast(device_type, getattr(torch._C.DispatchKey, key)), key)


@functools.cache
def register_dtensor_rules() -> None:
    """Makes the raw ops known to DTensor; only the first call does anything."""
    from torch_fdattn.ops import dtensor_rules

    dtensor_rules.register()


def load_rules_for(tensor: Tensor) -> None:
    """Called by every composite, and every op that writes, with its first input: loads what a tensor
    subclass needs.
    """
    if type(tensor) is not Tensor and "torch.distributed.tensor" in sys.modules:
        register_dtensor_rules()


def refuse_double_backward(op: str) -> None:
    """Called by every backward: under create_graph=True its results would silently count as constants.

    torch's `once_differentiable` sees only whether the incoming gradients require grad, not q, k and v.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"torch.ops.fdattn.{op} has no second derivative: its backward cannot run with create_graph=True"
        )


class Once(torch.autograd.Function):
    """A raw op that computes a derivative, as part of what others differentiate: Once.apply(name, op, *arguments).

    Its results are right as they are and refuse to be differentiated, in either mode, when it is asked for: a
    derivative that is detached, or that torch.func computes with create_graph=True, is used as a constant.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(name, op, *arguments):
        return op(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx, *_):
        refuse_second_derivative(ctx.name)

    @staticmethod
    def jvp(ctx, *_):
        refuse_second_derivative(ctx.name)


def refuse_second_derivative(op: str) -> None:
    raise NotImplementedError(
        f"torch.ops.fdattn.{op} has no second derivative: neither its backward nor its tangent (torch.func.jvp) "
        "can be differentiated"
    )


def in_forward_mode(*arguments: object) -> bool:
    """Whether torch.func differentiates a call or makes a batch of it, or one of its arguments has a tangent."""
    functionalize = torch._C._functorch.TransformType.Functionalize
    if any(x.key() != functionalize for x in _transforms()):
        return True
    return forward_ad._current_level >= 0 and any(has_tangent(x) for x in arguments)


class _NoGradient(torch.autograd.Function):
    """A raw op's results, whose backward says by what name that there is none."""

    @staticmethod
    def forward(message, raw, *arguments):
        return raw(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.message = inputs[0]

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(ctx.message)


def run_without_derivatives(op: str, where: str, raw: Callable, *arguments: object):
    """raw(*arguments). Inputs may require gradients, as a model's do outside of no_grad: only a backward raises.

    By the name that users call, where the raw op beneath would be named otherwise.
    """
    if forward_ad._current_level >= 0 and any(map(has_tangent, arguments)):
        raise NotImplementedError(
            f"{op} has no forward-mode derivative {where} (torch.func.jvp, torch.autograd.forward_ad)"
        )
    if torch.is_grad_enabled() and any(map(requires_grad, arguments)):
        message = f"{op} has no gradient {where}: call it under torch.no_grad()"
        return _NoGradient.apply(message, raw, *arguments)
    return raw(*arguments)


def in_vmap() -> bool:
    """Whether a call is made for a batch of calls (torch.func.vmap, jacfwd)."""
    vmap = torch._C._functorch.TransformType.Vmap
    return any(x.key() == vmap for x in _transforms())


def _transforms() -> Sequence:
    """torch.func's, that are under way."""
    return torch._C._functorch.get_interpreter_stack() or ()


def requires_grad(arg: object) -> bool:
    return isinstance(arg, Tensor) and arg.requires_grad


def has_tangent(arg: object) -> bool:
    return isinstance(arg, Tensor) and forward_ad.unpack_dual(arg).tangent is not None


def _autocast(arg: Tensor, dtype: torch.dtype) -> Tensor:
    # As torch's own autocast: double precision is a deliberate choice and stays; so does a cache in float8.
    eligible = arg.is_floating_point() and arg.dtype != torch.float64 and arg.dtype.itemsize > 1
    return arg.to(dtype) if eligible else arg
