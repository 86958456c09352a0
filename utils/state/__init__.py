"""Checkpoints and stop signals: what a run needs to be resumed. Open first: checkpoints.py, then resume.py
(which checkpoint is loaded), stateful.py and tensors.py (what it holds), stop_signals.py."""
