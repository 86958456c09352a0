"""Everything that happens to text before it is a batch: documents, then tokens, then batches. load.py is
what the scripts call; prepare.py and convert.py are commands.
"""
