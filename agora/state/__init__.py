"""Checkpoints on disk, copies of the state for peers that join, transfers between replicas, exported models."""
