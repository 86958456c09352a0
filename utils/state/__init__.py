"""What makes a run survive: checkpoints, stop signals, checks of edits."""
