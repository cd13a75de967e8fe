"""One run in several processes."""
