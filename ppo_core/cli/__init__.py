"""The command that trains once: `python -m ppo_core`, shared with `ppo-tuner train`."""
