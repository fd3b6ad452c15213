"""Matmuls next to collectives, in the graphs that autograd has been through: one op each, which overlaps the two.

    rows     what a graph does to rows, and doing the same to others
    match    finds all-gather -> matmul, matmul -> reduce-scatter, matmul -> all-reduce
    emit     puts an op in their place
    passes   the pass itself, and its option

DTensor models, functional collectives and this package's own layers come down to the same few ATen nodes, forward and
backward alike, which is why the pass looks at those and not at Dynamo's graph.
"""
