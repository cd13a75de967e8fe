"""PPO itself: advantages, losses, KL, the update."""
