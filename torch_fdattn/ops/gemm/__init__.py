"""Matrix products in Triton, and weights in float8."""
