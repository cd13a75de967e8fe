"""Generation of responses."""
