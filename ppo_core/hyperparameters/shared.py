"""Bounds and sources that several declarations share."""

from ppo_core.declare import Bounds

POSITIVE = Bounds(0, low_open=True)
COUNT = Bounds(1)
SHARE = Bounds(0, 1)
RATE = Bounds(0, 1)
CRITIC = "it decides which critic the checkpoint holds, if any"
TRL = "TRL 1.12 PPOConfig"
PPO_PAPER = "Schulman et al. 2017, arXiv 1707.06347"
ZIEGLER = "Ziegler et al. 2019, arXiv 1909.08593"
