"""Attention's backward for Hopper's tensor cores, in Gluon: imported where a kernel of it is compiled, and nowhere else."""
