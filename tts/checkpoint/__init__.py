"""A checkpoint's files: from a folder or from the hub, its tokenizer and its chat template."""
