"""From arrays of token ids to batches of rows, in an order drawn by the seed. Begin with rows.py."""
