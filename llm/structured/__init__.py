"""Output that matches a JSON schema: grammars, and their bitmasks over the vocabulary."""
