"""Loading models, their heads and adapters, and the memory they take."""
