"""Benchmarks: live comparisons on this machine, behind `./scripts/bench NAME` and docs/reference/benchmarks.md.

Must not be known by `agora`: the installed product has no benchmarks.
"""
