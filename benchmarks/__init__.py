"""Benchmarks of torch_fdattn against peers and floors: `python -m benchmarks --help`."""
