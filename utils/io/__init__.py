"""The ground floor, which imports nothing of the project: URLs, retries, whole files, masked secrets."""
