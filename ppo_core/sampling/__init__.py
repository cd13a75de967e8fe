"""How responses are generated."""
