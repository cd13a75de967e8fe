"""The study engine: which trials to run, running, judging and remembering them."""
