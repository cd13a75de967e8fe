"""Plotly figures as pure functions from frames, for views that are drawn once and explored. No text from outside."""
