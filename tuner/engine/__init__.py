"""Engines: run trials in worker processes."""
