"""Scripts that run as they stand, and two packages that `python -m benchmarks` runs: kernel_ladder and training_curves."""
