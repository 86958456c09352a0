"""Everything that happens to text before it is a batch."""
