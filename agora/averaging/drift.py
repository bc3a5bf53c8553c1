"""Whether an average can be believed, and when a newcomer counts. Pure."""
