"""A case's right answers: exact results, and samples of torch's own error at the case's dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_fdattn.testing.cases import AttentionCase, MergeCase
from torch_fdattn.testing.errors import check_close, check_lse
from torch_fdattn.testing.oracle import FORMULATIONS, attention_oracle, gradients, merge_oracle
from torch_fdattn.testing.varlen_cases import VarlenCase

#: In fp32 torch's error is sampled on this many inputs of the case's shape (`errors.py` says why); so is that of
#: a parameter's gradient at any dtype, whose few elements are sums over everything, and that of whatever else has
#: few elements that are not zero: the largest of 64 errors says little about the next 64. Where the output itself
#: has so few, all its rows may see one key; there torch's derivative of the softmax cancels without a rounding, and
#: that of a streaming backward, which subtracts the saved output, cannot: what rounding it costs this case counts too.
SAMPLES = 8
FEW = 512


@dataclass(frozen=True)
class Expected:
    """The exact lse, and by name each other result's exact value and samples of torch's error."""

    dtype: torch.dtype
    lse: Tensor
    values: dict[str, tuple[Tensor, list[Tensor]]]
    factor: float = 2.0

    def check(self, lse: Tensor, **results: Tensor) -> None:
        """Asserts lse's bound and the error rule for the results given by name."""
        check_lse(lse.detach(), self.lse, self.dtype)
        for name, result in results.items():
            exact, torch_errors = self.values[name]
            if result.dim() == 1:  # gradients of (H,) parameters
                result, exact = result[None], exact[None]
                torch_errors = [x[None] for x in torch_errors]
            # dlses has no head dim and is fp32 always: its rows are its heads, its precision that of outs.
            dtype = self.dtype if name == "dlses" else None
            check_close(name, result.detach(), exact, torch_errors, dtype, self.factor)


def _leaves(
    case: AttentionCase | VarlenCase, device: str, dtype: torch.dtype, backward: bool
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """(inputs, parameters that have gradients, all parameters as they are given) at a dtype."""
    inputs = [x.to(dtype).requires_grad_(backward) for x in case.inputs(device)]
    given = case.parameters(device)
    parameters = {
        name: x.to(dtype).requires_grad_(backward)
        for name, x in given.items()
        if x.is_floating_point()
    }
    return inputs, parameters, given


def expected_attention(case: AttentionCase, device: str, *, backward: bool = True) -> Expected:
    """The answers out, lse and, with backward, dq, dk, dv and d<parameter> of an attention or decode case."""

    def run(
        case: AttentionCase, dtype: torch.dtype, formulation: str | torch.dtype
    ) -> dict[str, Tensor]:
        inputs, parameters, given = _leaves(case, device, dtype, backward)
        options = case.oracle_options() | given | parameters
        outputs = attention_oracle(*inputs, **options, formulation=formulation)
        leaves = [*inputs, *parameters.values()]
        found = gradients(outputs, leaves, case.output_gradients(device)) if backward else ()
        names = ("out", "lse", "dq", "dk", "dv", *(f"d{name}" for name in parameters))
        return dict(zip(names, (*outputs, *found), strict=False))

    return _expected(case, run, FORMULATIONS if case.dtype == torch.float32 else FORMULATIONS[:1])


def expected_varlen(case: VarlenCase, device: str, *, backward: bool = True) -> Expected:
    """The answers out, lse and gradients of a varlen_attention case, all (H, T, …) but the parameters'."""

    def run(
        case: VarlenCase, dtype: torch.dtype, formulation: str | torch.dtype
    ) -> dict[str, Tensor]:
        inputs, parameters, given = _leaves(case, device, dtype, backward)
        outputs = case.oracle(*inputs, given | parameters, formulation)
        found = ()
        if backward:
            dout, dlse = case.output_gradients(device)
            grads = dout.transpose(0, 1), dlse
            by_token = gradients(outputs, [*inputs, *parameters.values()], grads)
            found = [*(x.transpose(0, 1) for x in by_token[:3]), *by_token[3:]]
        names = ("out", "lse", "dq", "dk", "dv", *(f"d{name}" for name in parameters))
        return dict(zip(names, (*outputs, *found), strict=False))

    return _expected(case, run, FORMULATIONS if case.dtype == torch.float32 else FORMULATIONS[:1])


def expected_merge(case: MergeCase, device: str) -> Expected:
    """The answers out, lse, douts and dlses of a merge case."""

    def run(
        case: MergeCase, dtype: torch.dtype, formulation: str | torch.dtype
    ) -> dict[str, Tensor]:
        outs, lses = case.inputs(device)
        lse_dtype = torch.promote_types(dtype, lses.dtype)
        inputs = [outs.to(dtype).requires_grad_(), lses.to(lse_dtype).requires_grad_()]
        out, lse = merge_oracle(*inputs)
        douts, dlses = gradients((out, lse), inputs, case.output_gradients(device))
        if dtype != torch.float64 and case.out_dtype:
            out = out.to(case.out_dtype)
        return {"out": out, "lse": lse, "douts": douts, "dlses": dlses.permute(1, 2, 3, 0)}

    return _expected(case, run, FORMULATIONS[:1])


def _expected(
    case, run: Callable[..., dict[str, Tensor]], formulations: tuple[str, ...]
) -> Expected:
    errors: dict[str, list[Tensor]] = {}
    sums = {f"d{name}" for name in getattr(case, "parameters", lambda device: ())("cpu")}
    everything = case.dtype == torch.float32
    found: dict[str, Tensor] = {}

    def takes_samples(name: str, x: Tensor) -> bool:
        return name != "lse" and (everything or name in sums or is_few(x))

    def is_few(x: Tensor) -> bool:
        return 0 < x.count_nonzero() < FEW

    for sample in range(SAMPLES):
        drawn = replace(case, seed=case.seed + 1_000_000 * sample)
        exact = {name: x.detach() for name, x in run(drawn, torch.float64, FORMULATIONS[0]).items()}
        found = found or exact
        runs = [(case.dtype, formulation) for formulation in formulations]
        if sample == 0 and is_few(found["out"]) and not everything:
            runs.append((torch.float64, case.dtype))
        for dtype, formulation in runs:
            for name, x in run(drawn, dtype, formulation).items():
                if sample == 0 or takes_samples(name, found[name]):
                    errors.setdefault(name, []).append(x.detach().double() - exact[name])
        if not any(takes_samples(name, x) for name, x in found.items()):
            break
    exact = found
    lse = exact.pop("lse")
    values = {name: (x, errors[name]) for name, x in exact.items()}
    return Expected(case.dtype, lse, values, getattr(case, "error_factor", 2.0))
