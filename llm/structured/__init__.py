"""Output that fits a JSON schema: grammars, and the bitmasks they put on the vocabulary."""
