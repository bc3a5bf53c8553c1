"""Checkpoints on disk, copies of the state for peers that join, transfers between replicas, exported models.

Knows arrays, names, hashes, files, and calls that others carry. Must not know torch, the network, or which peers exist.
"""
