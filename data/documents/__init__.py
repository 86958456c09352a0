"""In: the name of a source (files, folders, URLs, Hub ids, installed packages). Out: a Corpus of documents,
and the decision which of them are trained on, evaluated on or left out. Begin with source.py.
"""
