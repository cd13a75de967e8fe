"""What a run is told: hyperparameters, batch sizes, the KL budget. Never imports torch."""
