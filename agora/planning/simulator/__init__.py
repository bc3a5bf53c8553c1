"""A discrete-event simulation of a swarm that runs the daemon's own decisions, for thousands of peers."""
