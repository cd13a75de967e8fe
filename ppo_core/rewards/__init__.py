"""What scores responses: models, Python functions, HTTP endpoints, and their weighted sum."""
