"""The saved model and its card in output_dir, and pushes of it to the Hub. In come the trained model and the
facts of the run, out go files and commits. First open export.py: `save_model` writes what hub.py pushes."""
