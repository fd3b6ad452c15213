"""Fourth stage: nodes of our ops in place of an attention.

    attention        the stage: the op's node, and what brings its inputs and output into order
    mask_arguments   a recovered mask as arguments of the op; mask_nodes.py: from expressions to nodes
    empty_rows       the output of queries that see no key
    packing          chunks as packed sequences

Where a stage cannot emit, it has changed nothing.
"""
