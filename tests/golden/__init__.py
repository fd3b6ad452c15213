"""Golden launches: what a list of calls launches on a GPU, written down, without a GPU.

`launches.txt` holds the kernel, grid, options and arguments of every launch of every call in `calls/`, as an H100 (a few
calls: another GPU) would be given them. `test_golden.py` compares it with what is launched today. It is the net under
changes of the launch layer and of how options travel from an op to its kernels: those must not change this file.

    python -m tests.golden            compares, and prints what differs
    python -m tests.golden --write    writes the file anew
    python -m tests.golden NAME       prints the launches of the calls whose name contains NAME, all arguments in full

Calls go through the public entries where there are any, so that everything between an entry and its launches may change.
A pure renaming of kernels, modules or parameters can be carried out in `launches.txt` by the same sed script; then the
comparison shows that it was nothing else.

- `recorder.py`  what stands in the place of a launch, and how its arguments are written
- `device.py`    the GPU and the process group that are not there
- `book.py`      the file: writing, reading, comparing
- `calls/`       the calls, a file for each op
"""
