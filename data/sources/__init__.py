"""Where text comes from, and files at any URL."""
