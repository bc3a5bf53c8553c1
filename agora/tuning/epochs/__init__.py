"""Which origin trains on which row: each row once an epoch across the swarm, without a coordinator."""
