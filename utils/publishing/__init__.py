"""The saved model and its model card in output_dir, and pushes to the Hub. Open first: export.py, whose
`save_model` writes the files that hub.py pushes."""
