"""What is reckoned from a study's frames before it is drawn or told: pure functions, a file a question."""
