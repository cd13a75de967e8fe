"""The command line `ppo-tuner`: one module per group of commands."""
