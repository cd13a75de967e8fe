"""Run the best configurations again on fresh seeds and test prompts."""
