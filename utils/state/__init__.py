"""What makes a run survive. In: the things that a run needs to go on, and signals; out: folders in
output_dir/checkpoints, and an exit status. Open first: checkpoints.py (save, load), stop_signals.py."""
