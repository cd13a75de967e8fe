"""What a trial is worth, when it ends, what to change."""
