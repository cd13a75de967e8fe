"""Rewards: models, Python functions, HTTP endpoints, and their weighted sum."""
