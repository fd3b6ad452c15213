"""`fdattn bench serve`: the engine in this process, or a running server under Poisson arrivals."""
