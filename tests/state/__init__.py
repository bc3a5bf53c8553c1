"""What lasts: checkpoints, snapshots, transfers."""
