"""The loop that runs a study, and what people ask of it."""
