"""Attention drawn from the forms that models write, through the backend, against eager: `make drawn-forms`.

    python -m tests.compile_backend.drawn_forms [--count 500]

A form has a layout (heads merged with the batch, groups of heads, transposed products, einsums), a way to scale the
scores (in place, by baddbmm, by a temperature that is learned), up to two masks, each with a way to write it, perhaps
a limit at the dtype's least number, and something that weights pass through. Outputs and all gradients are held to
the error rule against fp64, and NaN stands where eager has it, or the attention is left for a reason. The table is
kept beside this file.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.compile_backend.drawn_masks import _finite, compare
from tests.compile_backend.form_drawing import Form

#: Inputs of which torch's own error is taken, in fp32 and where a gradient is a few numbers that are sums of all.
SAMPLES = 8
#: Of all forms, what is to be rewritten.
LEAST_SHARE = 0.9

#: Of the file that keeps the table.
HEAD = """# Drawn forms of attention, through `backend="fdattn"`

`make drawn-forms`, on a CPU. Outputs and all gradients agree with eager by the error rule, or are to the bit those of torch's own SDPA, whose kernel our op runs on a CPU."""


def check_one(seed: int) -> str:
    """Compiles one and compares; returns "rewritten", or the reason why it was left."""
    case = Form(seed)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(case.attend, backend="fdattn", options={"lower": "eager"})
    found = case.results(compiled, case.dtype)
    counted = counters["fdattn"]
    assert counted["rewritten"] + counted["left"] == 1, f"{case}: {dict(counted)}"
    eager = case.results(case.attend, case.dtype)
    exact = case.results(case.exact, torch.float64)
    errors: dict[str, list[Tensor]] = {name: [] for name in found}
    many = case.dtype == torch.float32 or any(x.requires_grad for x in case.given)
    for sample in range(SAMPLES if many else 1):
        right = exact if not sample else case.results(case.exact, torch.float64, sample)
        runs = [(x, case.dtype) for x in (case.attend, case.exact, case.reversed)]
        if case.dtype != torch.float64:
            runs += [(case.streamed, torch.float32), (case.streamed, torch.float64)]
        for way, dtype in runs:
            for name, x in case.results(way, dtype, sample).items():
                errors[name].append(_finite(x.double() - right[name]))
    try:
        for name, x in found.items():
            compare(case, name, x, eager[name], exact[name], errors[name])
    except AssertionError as error:
        if not has_bits_of_sdpa(case, found):
            raise AssertionError(f"{case}: {error}") from None
        return "rewritten, with the bits of torch's SDPA, which are beyond the rule"
    reasons = [key.removeprefix("left/") for key in counted if key.startswith("left/")]
    return reasons[0] if reasons else "rewritten"


def has_bits_of_sdpa(case: Form, found: dict[str, Tensor]) -> bool:
    """Whether torch's own fused attention gives these very results: on a CPU our op runs that kernel."""
    if "temperature" in case.scaling or case.limit != "none":
        return False
    expected = case.results(case.fused, case.dtype)
    return all(torch.equal(x, expected[name]) for name, x in found.items())


def table(results: dict[int, str]) -> str:
    count, cases = len(results), {seed: Form(seed) for seed in results}
    done = sum(result.startswith("rewritten") for result in results.values())
    lines = [
        f"Of {count} drawn forms {done} ({done / count:.0%}) are rewritten; all agree with eager.",
        "", "| | forms |", "|---|---:|",
    ]  # fmt: skip
    for result, n in Counter(results.values()).most_common():
        lines.append(
            f"| {result if result.startswith('rewritten') else f'left: `{result}`'} | {n} |"
        )
    rows = {
        "layout": lambda c: [c.layout], "scaled": lambda c: [c.scaling], "limit": lambda c: [c.limit],
        "mask": lambda c: {x.kind for x in c.masks} or ["none"], "written": lambda c: {x.way for x in c.masks},
        "weights": lambda c: [c.weights], "dtype": lambda c: [str(c.dtype).removeprefix("torch.")],
        "gradients": lambda c: ["wanted" if c.trained else "none"],
    }  # fmt: skip
    lines += ["", "| with | | forms | rewritten |", "|---|---|---:|---:|"]
    for what, of in rows.items():
        total, rewritten = Counter(), Counter()
        for seed, case in cases.items():
            total.update(of(case))
            rewritten.update(of(case) if results[seed].startswith("rewritten") else ())
        lines += [
            f"| {what} | {x} | {n} | {rewritten[x] / n:.0%} |" for x, n in sorted(total.items())
        ]
    return "\n".join(lines)


def main(count: int) -> int:
    results, wrong = {}, 0
    for seed in range(count):
        try:
            results[seed] = check_one(seed)
        except AssertionError as error:
            wrong += 1
            print(error, file=sys.stderr)
    found = table(results)
    print(found)
    if count >= 500 and not wrong:
        text = f"{HEAD}\n\n{found}\n"
        (Path(__file__).parent / "drawn_forms.md").write_text(text)
    rewritten = sum(result.startswith("rewritten") for result in results.values())
    return int(wrong > 0 or rewritten < LEAST_SHARE * count)


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=500)
    sys.exit(main(parser.parse_args().count))
