"""The battery: eight small tasks made from seeds, three arms on each, and what they come to."""
