"""From documents, or token files of other projects, to token shards, the only format that is trained on.
Begin with shards.py, which reads them; preparation.py writes them.
"""
