"""Distributed ops, back to back, in any order: torchrun --nproc-per-node N -m tests.soak [decode|tp_linear].

`loop.py` draws calls of two overlapping groups, lets ranks come late, starts epochs again and again just below the
ends of their 31 and 32 bits and, on GPUs, has several calls under way at once on several streams and mixes replays
of CUDA graphs with eager calls. `decode.py` and `tp_linear.py` say what is called and what must come out.

Values are scaled by a power of two of each call's own, so that what an earlier call left behind is wrong, and the
expected result is known without computing it anew. Exit code 1 on a mismatch, a time-out or a hang.
"""
