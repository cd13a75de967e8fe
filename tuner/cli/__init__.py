"""The command line `ppo-tuner`: a module a group of commands."""
