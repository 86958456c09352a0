"""From text to batches: documents/, then tokens/, then batches/. The scripts call load.py: it opens the
datasets of a run, and prepare.py turns text into token shards. prepare.py and convert.py are also commands.
"""
