"""What makes a run survive: checkpoints, stop signals, the rehearsal."""
