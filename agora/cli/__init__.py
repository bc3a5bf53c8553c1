"""The two commands: `agora-node` for people who contribute, `swarm` for people who start, watch or use a run.

Every command imports what it needs when it runs, so that --help and errors in flags are instant.
"""
