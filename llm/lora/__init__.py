"""Low-rank adapters beside a base model: their files, and which of them a batch uses."""
