"""From the name of a source to documents to train on and to evaluate on. Begin with source.py."""
