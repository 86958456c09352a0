"""The ground floor, which imports nothing of the project. In: bytes, text, URLs, exceptions. Out: whole files
and sealed folders, text without credentials, messages and exit statuses for mistakes. Open first:
mistakes.py, which both scripts and all commands use; then files.py, urls.py, text.py."""
