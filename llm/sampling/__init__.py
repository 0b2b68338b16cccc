"""From logits to token ids and log-probabilities."""
