"""Tasks and prompts."""
