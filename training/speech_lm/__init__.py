"""The natural voice's language model: text and voice tokens in, codes of the codec out."""
