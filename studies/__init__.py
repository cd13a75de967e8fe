"""The study files that ship with PPO Tuner (package data)."""
