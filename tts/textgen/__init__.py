"""Text requests: generation and embeddings."""
