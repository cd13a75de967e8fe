"""Configuration of a run: hyperparameters, batch sizes, the KL budget. Never imports torch."""
