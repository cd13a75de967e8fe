"""The command that trains once: `python -m ppo_core`, and the ground that `ppo-tuner train` stands on."""
