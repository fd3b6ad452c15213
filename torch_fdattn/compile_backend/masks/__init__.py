"""Second stage: recovers what a mask means by reading the graph that makes it.

recovery       the stage: terms of one attention in, what is proven of them out
reader         from a mask's node to the expression of its entry
expressions    polynomials and conditions over (batch, head, query, key)
structure      from conditions to start, window, lengths; from a bias to ALiBi; chunks.py: chunked masks
hidden_rows    what queries that see no key attend to
terms          the data that these pass on
"""
