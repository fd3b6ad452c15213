"""Second stage: recovers what a mask means by reading the graph that makes it.

    recovery       the stage: the terms of one attention in, what is proven of them out
    reader         from a mask's node to the expression of its entry, by the rules of views, arithmetic and conditions
    entries        what these rules share
    expressions    polynomials and conditions over (batch, head, query, key); expressible.py: which can become nodes
    structure      from conditions to start, window and lengths; from a bias to ALiBi; chunks.py: chunked masks
    values         which numbers an additive mask may hold, and which of them hide scores
    hidden_rows    what queries that see no key attend to
    terms          the data that these pass on

What has no rule is an unknown number, so whatever a recovered mask says is true.
"""
