"""How far the replicas of a stage are together, and when it steps. Pure."""
