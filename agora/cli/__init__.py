"""The two commands: `agora-node` for who contributes, `swarm` for who looks at, starts or uses a run.

Knows: flags, exit codes, what people read. Must not know: torch, hivemind, pydantic at import; every command imports
what it needs when it runs, so that `--help` and `status` are instant.
"""
