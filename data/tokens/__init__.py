"""From documents, or token files of other projects, to token shards. Begin with shards.py."""
