"""The battery: small tasks of two makers, made from seeds, three arms on each, and what they come to."""
