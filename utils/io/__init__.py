"""Files, URLs, text without credentials, and messages for exceptions. Imports nothing else of the project.
Open first: mistakes.py, which both scripts and all commands use."""
