"""Which origin takes which microbatch of an epoch: each once an epoch across the swarm, without a coordinator."""
