"""The order of emitted nodes does not follow from Python's hashes, which every process draws anew."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch
from tests.compile_backend.harness import Recorder
from tests.compile_backend.test_hash_seeds import functions

for function, *inputs in functions():
    torch._dynamo.reset()
    recorder = Recorder("eager")
    torch.compile(function, backend=recorder, fullgraph=True)(*inputs)
    assert recorder.found.report.rewritten, recorder.found.report
    print(recorder.found.graph)
"""


def functions():
    """Attention under masks of several conditions, and of polynomials of several terms."""
    import torch

    q, k, v = torch.randn(3, 2, 4, 12, 16).unbind()
    rows, columns = torch.arange(12)[:, None], torch.arange(12)
    documents, padding = torch.randint(3, (2, 12)), torch.rand(2, 12) < 0.8
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def of_documents(q, k, v, documents, padding):
        seen = (documents[:, :, None] == documents[:, None]) & padding[:, None]
        seen = seen & ((rows >= columns) | (columns < 2)) & (rows - columns < 9)
        return sdpa(q, k, v, attn_mask=seen[:, None])

    def of_a_bias(q, k, v, documents, padding):
        bias = torch.where(rows >= columns, 0.5 * (rows - columns) + documents[:, None, None], -1e9)
        return sdpa(q, k, v, attn_mask=bias.masked_fill(~padding[:, None, None], -1e9))

    return [(f, q, k, v, documents, padding) for f in (of_documents, of_a_bias)]


def test_graphs_are_equal_in_all_processes():
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env=os.environ | {"PYTHONHASHSEED": seed}, text=True,
            stdout=subprocess.PIPE,
        )
        for seed in ("1", "2", "3")
    ]  # fmt: skip
    graphs = [run.communicate(timeout=300)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert "fdattn.attention" in graphs[0]
    assert graphs[1] == graphs[0]
    assert graphs[2] == graphs[0]
