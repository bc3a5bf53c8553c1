"""Benchmarks: live comparisons on this machine, behind `./scripts/bench NAME` and docs/benchmarks.md.

Knows: everything below it, as a user does (daemons as processes, rooms by their public seams). Must not be known by any
other room but the command line, which loads it only when asked.
"""
