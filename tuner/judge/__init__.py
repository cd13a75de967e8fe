"""Judgement of trials: their worth, the guard that ends them, what to change, the answer."""
