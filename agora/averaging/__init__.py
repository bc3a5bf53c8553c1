"""Replicas of a stage agree: when the stage steps, which weights and gradients are averaged, and by which."""
