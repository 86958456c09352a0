"""What makes a run survive. In: the model, the optimizer and all else that a run needs to go on, and signals.
Out: folders in output_dir/checkpoints, and an exit status. Open first: checkpoints.py, then resume.py (which
one is loaded), stateful.py (what it holds), stop_signals.py."""
