"""From arrays of token ids to batches of rows, in an order that is a function of (seed, position). Begin with
rows.py; a run with several data sets also uses mixture.py.
"""
