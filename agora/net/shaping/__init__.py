"""Emulated links and the owner's rate limits."""
