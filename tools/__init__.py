"""Make the data that ships with the built-in tasks; not part of the package."""
