"""In: arrays of token ids. Out: rows of T tokens, in an order that is a function of (seed, position), as
batches. Begin with rows.py; a run with several data sets also uses mixture.py.
"""
