"""From the name of a source (files, URLs, Hub ids, installed packages) to documents, and the choice which of
them are trained on, evaluated on or left out. Begin with source.py.
"""
