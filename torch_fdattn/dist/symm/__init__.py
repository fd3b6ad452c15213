"""Symmetric memory: memory that every rank of a group maps, and the one-sided exchanges through it."""
