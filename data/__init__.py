"""From text to batches: documents/, then tokens/, then batches/. The scripts call load.py, for which open.py
opens the data sets and prepare.py turns text into token shards. prepare.py and convert.py are also commands.
"""
