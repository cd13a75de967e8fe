"""What a study is told: its file, search space, budgets."""
