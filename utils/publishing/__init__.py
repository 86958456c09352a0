"""What leaves the run: the exported model, its card, pushes to the Hub."""
