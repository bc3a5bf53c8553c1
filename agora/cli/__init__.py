"""The two commands: `agora-node` for people who contribute, `swarm` for people who start, watch or use a run.

Knows: flags, exit codes, what people read. Must not know: torch, hivemind, pydantic at import; every command imports
what it needs when it runs, so that `--help` and `status` are instant.
"""
