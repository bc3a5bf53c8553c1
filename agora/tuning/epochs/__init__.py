"""epochs."""
