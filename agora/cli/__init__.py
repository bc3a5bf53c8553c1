"""The two commands: `agora-node` for people who contribute, `swarm` for people who start, watch or use a run."""
