"""FlashAttention's own tests, drawn, against our drop-in: python -m tests.conformance.flash_attn PATH.

PATH is its tests/test_flash_attn.py, or hopper/test_flash_attn.py for the interface of FlashAttention-3. A copy of the
file is run with `torch_fdattn.dropins.flash_attn.install()` in force; the file's own tolerances decide. Each test passed,
was skipped by the file itself, was refused as `flash_attn_refusals.txt` expects, or failed: a wrong number, a refusal
that the list does not have, a skip from elsewhere. On a GPU a launch counted as ".../cpu" is a failure too.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import types
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import torch_fdattn
from torch_fdattn.ops.library import launches

REFUSALS = Path(__file__).with_name("flash_attn_refusals.txt")
VERDICTS = ("passed", "skipped by the file", "refused as listed", "FAILED")


@dataclass
class Refusal:
    """A line of the list: what of which test function may be refused."""

    function: str
    pattern: re.Pattern
    reason: str
    met: int = 0


def read_refusals(path: Path = REFUSALS) -> list[Refusal]:
    lines = [x.strip() for x in path.read_text(encoding="utf-8").splitlines()]
    parts = [[y.strip() for y in x.split(" | ")] for x in lines if x and not x.startswith("#")]
    return [Refusal(function, re.compile(text), reason) for function, text, reason in parts]


@dataclass(eq=False)  # pytest before 9 keeps plugins in a set
class Conformance:
    """The pytest plugin that draws tests and judges them."""

    file: Path
    per: int
    seed: int
    longest: int
    refusals: list[Refusal]
    drawn: Counter = field(default_factory=Counter)
    verdicts: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    failures: list[str] = field(default_factory=list)
    _errors: dict[str, BaseException] = field(default_factory=dict)

    @pytest.hookimpl(trylast=True)  # after -k
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_function = defaultdict(list)
        for item in items:
            if length_of(item) <= self.longest:
                by_function[item.originalname].append(item)
        generator, kept = random.Random(self.seed), []
        for name in sorted(by_function):
            chosen = by_function[name]
            kept += generator.sample(chosen, min(self.per, len(chosen)))
        self.drawn.update(item.originalname for item in kept)
        generator.shuffle(kept)
        items[:] = kept

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        report = (yield).get_result()
        if report.when != "call" and report.passed:
            return
        verdict, told = self._judge(item.originalname, report, call.excinfo)
        self.verdicts[item.originalname][verdict] += 1
        if verdict == "FAILED":
            self.failures.append(f"{item.name}: {told}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failures.append(f"{report.nodeid} cannot be collected: {report.longrepr}")

    def _judge(self, function: str, report: pytest.TestReport, excinfo) -> tuple[str, str]:
        if report.passed:
            return "passed", ""
        told = f"{excinfo.type.__name__}: {str(excinfo.value).splitlines()[0] if str(excinfo.value) else ''}"  # fmt: skip
        if report.skipped:
            # skipif marks are the file's too; what pytest.skip() raises has its place.
            by_file = not isinstance(report.longrepr, tuple) or Path(report.longrepr[0]).name == self.file.name  # fmt: skip
            return (
                ("skipped by the file", told) if by_file else ("FAILED", f"a foreign skip: {told}")
            )
        for refusal in self.refusals:
            # A comparison that failed is a wrong number, whatever the list says.
            if refusal.function not in (function, "*") or excinfo.errisinstance(AssertionError):
                continue
            if refusal.pattern.search(str(excinfo.value)):
                refusal.met += 1
                return "refused as listed", told
        return "FAILED", told


def length_of(item: pytest.Item) -> int:
    """The longest sequence among a test's parameters."""
    parameters = getattr(item, "callspec", None)
    named = parameters.params.items() if parameters else ()
    return max([x for name, x in named if name.startswith("seqlen") and type(x) is int], default=0)


def apply_rotary_emb(
    x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None
):  # fmt: skip
    """What the tests compare rotation with: products of complex numbers, written here so that it is not ours against ours."""
    if inplace or cu_seqlens is not None:
        raise NotImplementedError(
            "apply_rotary_emb of the runner rotates dense tensors, out of place"
        )
    batch, length, _, _ = x.shape
    dims = 2 * cos.shape[1]
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).reshape(-1, 1)
    positions = (offsets + torch.arange(length, device=x.device)).expand(batch, -1).long()
    angles = torch.complex(cos.double(), sin.double())[positions][:, :, None]
    turning = x[..., :dims].double()
    pairs = turning.unflatten(-1, (-1, 2)) if interleaved else turning.unflatten(-1, (2, -1)).mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angles)
    turned = (turned if interleaved else turned.mT).flatten(-2)
    return torch.cat((turned.to(x.dtype), x[..., dims:]), -1)


def provide_rotary() -> None:
    """`flash_attn.layers.rotary`, which the file imports and the drop-in does not have."""
    for name in ("flash_attn.layers", "flash_attn.layers.rotary"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["flash_attn.layers.rotary"].apply_rotary_emb = apply_rotary_emb


def pretend_device() -> None:
    """What the file asks of a GPU before it makes CPU tensors."""
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=2**40)


def run(path: Path, device: str, plugin: Conformance, options: list[str]) -> int:
    """pytest's exit code; the plugin has the verdicts."""
    source = path.read_text(encoding="utf-8")
    if device == "cpu":
        pretend_device()
        source = re.sub(r"""(['"])cuda\1""", r"\1cpu\1", source)
    torch_fdattn.dropins.flash_attn.install()
    provide_rotary()
    sys.path.append(str(path.parent))  # their helpers lie beside it
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        copy.write_text(source, encoding="utf-8")
        (Path(folder) / "pytest.ini").write_text("[pytest]\n")
        given = ["-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", f"--rootdir={folder}"]
        return pytest.main([*given, "-c", f"{folder}/pytest.ini", *options, str(copy)], [plugin])


def table(plugin: Conformance) -> str:
    """A row for each test function, and their sum."""
    width = max((len(x) for x in plugin.drawn), default=5)
    rows = [f"{'':{width}}  drawn  " + "  ".join(VERDICTS)]
    total: Counter = Counter()
    for name in [*sorted(plugin.drawn), "total"]:
        counts = total if name == "total" else plugin.verdicts[name]
        drawn = plugin.drawn.total() if name == "total" else plugin.drawn[name]
        cells = "  ".join(f"{counts[x]:{len(x)}}" for x in VERDICTS)
        rows.append(f"{name:{width}}  {drawn:5}  {cells}")
        total += counts
    rows += [f"listed, {x.met} times: {x.function}: {x.reason}" for x in plugin.refusals if x.met]
    return "\n".join(rows)


def problems(plugin: Conformance, code: int, device: str) -> list[str]:
    """A sentence for all that keeps the run from being a success."""
    found = list(plugin.failures)
    ran = sum(x.total() for x in plugin.verdicts.values())
    if not ran or ran != plugin.drawn.total():
        found.append(f"{plugin.drawn.total()} tests were drawn and {ran} have a verdict (pytest's exit code {code})")  # fmt: skip
    on_cpu = {name: count for name, count in launches.items() if name.endswith("/cpu")}
    if device == "cuda" and on_cpu:
        found.append(f"calls ran on the CPU path: {on_cpu}")
    if not launches:
        found.append("no op of ours was called")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.flash_attn", description=__doc__.splitlines()[0])  # fmt: skip
    parser.add_argument("path", type=Path, help="FlashAttention's test file")
    parser.add_argument("--per", type=int, default=40, help="tests drawn of each function")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--longest", type=int, default=4096, help="no test of longer sequences")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--match", default="", help="pytest's -k: only these tests")
    given = parser.parse_args(arguments)
    if not given.path.is_file():
        parser.error(f"path must be FlashAttention's test file, got {given.path}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device, found none; --device cpu needs none")
    launches.clear()
    plugin = Conformance(given.path, given.per, given.seed, given.longest, read_refusals())
    code = run(given.path, given.device, plugin, ["-k", given.match] if given.match else [])
    failed = problems(plugin, code, given.device)
    print(table(plugin))
    print(f"launches: {dict(launches)}")
    for line in failed:
        print(f"FAILED {line}")
    print(f"{len(failed)} problems" if failed else "No wrong number, and nothing refused that is not listed.")  # fmt: skip
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
