"""Reachability: addresses, dialling, relays, hole punching."""
