"""The natural voice's codec: what is said in codes, who says it in the voice prompt."""
