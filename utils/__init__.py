"""Everything the two loops share and that can be tested alone."""
