"""Everything the two loops share and that can be tested alone. In: settings, rows of token ids, the
Accelerator. Out: a model and its optimizer, lines, checkpoints, a saved model. Open first: the scripts, which
call it all; then steps.py, settings.py and the folders, whose first lines say the same."""
