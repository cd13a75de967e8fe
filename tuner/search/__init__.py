"""The search: what is proposed next."""
