"""Replicas of a stage agree: when to step, which slice to average, who averages it, and what is made of the answer."""
