"""What both scripts share. In: settings, rows of token ids, the Accelerator. Out: a model and its optimizer,
log lines, checkpoints, a saved model. Read the scripts first, which call it all; then steps.py, settings.py
and the __init__.py of each folder."""
