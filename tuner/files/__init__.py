"""Checkpoints and logs on disk."""
