"""Specification of a study: its file, search space, starts, statuses."""
