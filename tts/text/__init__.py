"""Text processing: normalisation and segmentation into sentences and clauses."""
