"""Where a trial runs."""
