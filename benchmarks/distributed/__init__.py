"""Runs over the ranks of a process group: ring attention, tensor-parallel layers, whole models.

    torchrun --nproc-per-node N -m benchmarks NAME …      or      python -m benchmarks NAME --gpus N …

Tensor parallelism: `parallel_options.py` has the options, `layer_run.py` what runs share, `layers.py` the layers,
`matmuls.py` the three ops alone, `end_to_end.py` models, `crossover.py` the sweep that `auto` reads, `timeline.py` the plot.

`../ranks.py` joins or starts the ranks (`mpi.py` those of mpirun), `clock.py` times, `models.py` has the shapes,
`../peers` what we are compared with; `commands.py` holds the command lines.

Decode over a sharded cache is `dist_decode.py`: `shards.py` has the inputs and the exact answers,
`ways.py` what is compared, `case_run.py` takes one through a
case, `rounds.py` times (in turns, the slowest rank), `together.py` keeps ranks at the same step;
`latency.py` and `scaling.py` are its other cases.
"""
