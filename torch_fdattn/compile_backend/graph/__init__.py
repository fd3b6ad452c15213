"""Reading and changing Dynamo graphs: all that knows nothing of attention.

    nodes        which torch operation a node is, its arguments, what it yields
    data_flow    where data comes from and goes to, through writes in place and called graphs
    dims         where a dim of a node lies in its sources
    mutations    which nodes write in place
    functorch    which nodes stand under functorch's transforms
    constants    tensors that a graph makes from nothing
    parameters   tensors that hold what training made of parameters
    adder        inserts nodes

Nothing here adds a guard.
"""
