"""In: arrays of token ids. Out: rows of T tokens, in an order that is a function of (seed, position), as
batches. Begin with rows.py; a run with sentence pairs also uses pair_rows.py, one with several data sets
mixture.py.
"""
