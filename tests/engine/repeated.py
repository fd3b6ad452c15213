"""Captured passes without a GPU."""

import pytest
import torch

from torch_fdattn.engine import decode_graphs, prompt_graphs


class Repeated:
    """In the place of a captured step: what it runs reads and writes the same buffers, each time anew."""

    def __init__(self, run, device, pool, stream):
        self.run, self.calls, self.result = run, 0, run().clone()

    def __call__(self):
        self.calls += 1
        return self.result.copy_(self.run())


@pytest.fixture
def repeated(monkeypatch):
    """Captures without a GPU."""
    for module in (decode_graphs, prompt_graphs):
        monkeypatch.setattr(module, "CapturedStep", Repeated)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
