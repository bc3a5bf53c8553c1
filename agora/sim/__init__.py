"""The daemon's own decisions on simulated machines, links, churn and faults; and the virtual time of the tests.

Knows: the pure and deterministic modules of pipeline, swarm, averaging and net. Must not know: torch, models, daemons.
"""
