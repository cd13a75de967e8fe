"""The search: proposes trials and decides which runs next."""
