"""What each kernel costs on each GPU generation, compiled without a GPU: registers, spills, shared memory, occupancy.

The launchers themselves are called, on meta tensors, with `JITFunction.run` replaced by a recorder
(`launches.py`): a kernel is compiled (`compiled.py`) with the arguments, strides, attributes and options of a
real launch. `targets.py` has each generation's limits, `resources.py` the table of `python -m benchmarks
resources`. The tests hold kernels to these limits.

Must not run with TRITON_INTERPRET=1, which replaces the kernels by interpreted ones.
"""
