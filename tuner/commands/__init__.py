"""What the commands of `ppo-tuner` do, one module a group of commands."""
