"""Calls between peers: frames, connections, admission, budgets."""
