"""What leaves the run: the exported model, its card, milestones, and snapshots on their way to places."""
