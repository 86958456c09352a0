"""In: documents, or token files of others, and a tokenizer. Out: token shards, the one format that is trained
on. Begin with shards.py, which reads them; preparation.py makes them.
"""
