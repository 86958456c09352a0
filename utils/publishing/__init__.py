"""What leaves the run: the exported model, its card, milestones, and snapshots for remote storage."""
