"""Everything that happens to text before it is a batch: documents, then tokens, then batches. load.py is
what the scripts call: open.py opens the data sets, prepare.py makes shards of them, load.py reads their rows.
prepare.py and convert.py are also commands.
"""
