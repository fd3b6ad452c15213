"""Runs over the ranks of a process group: ring attention, tensor-parallel layers, whole models, sharded decode.

    torchrun --nproc-per-node N -m benchmarks NAME …      or      python -m benchmarks NAME --gpus N …

Tensor parallelism: `layer_run.py` has what runs share, `layers.py` the layers, `matmuls.py` the three ops alone,
`end_to_end.py` models, `models.py` their shapes, `crossover.py` the sweep that `auto` reads, `timeline.py` the plot;
`parallel_options.py` says what is wrong with their options.

Decode over a sharded cache is `dist_decode.py`: `shards.py` has the inputs and the exact answers, `variants.py` what is
compared, `case_run.py` takes one through a case; `latency.py` is of messages alone, `mpi.py` has the ranks of mpirun.

`suite.py` runs all of it in one go.
"""
