"""Tools of the documentation's build: generated pages."""
