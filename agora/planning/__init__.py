"""Optional: the search behind `swarm plan` and the simulator behind `swarm simulate`. Training never imports it."""
