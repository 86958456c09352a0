"""The ground floor, which imports nothing of the project: URLs, whole files, masked secrets."""
