"""Files, URLs, text without credentials, and messages and exit statuses for exceptions. Imports no other part
of the project. Open first: mistakes.py, which both scripts and all commands use; then files.py, urls.py,
text.py."""
