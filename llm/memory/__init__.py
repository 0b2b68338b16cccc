"""Memory: planning, transfers and staging."""
