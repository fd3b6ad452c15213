"""Runs over the ranks of a process group: ring attention, tensor-parallel layers, whole models.

    torchrun --nproc-per-node N -m benchmarks NAME …      or      python -m benchmarks NAME --gpus N …

`processes.py` joins or starts the ranks, `clock.py` times, `models.py` has the shapes, `peers.py` what we
are compared with; `commands.py` holds the command lines.
"""
