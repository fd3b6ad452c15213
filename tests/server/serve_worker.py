"""One rank of `fdattn serve`: python serve_worker.py OPTIONS, with torchrun's variables set.

FDATTN_TEST_HANGS: the rank whose steps do not end, as those that wait for a lost rank on a GPU.
"""

import os
import time

from torch_fdattn.cli import app
from torch_fdattn.engine import LLM

if __name__ == "__main__":
    if os.environ.get("FDATTN_TEST_HANGS") == os.environ["RANK"]:
        LLM.step = lambda self: time.sleep(1000)
    app()
