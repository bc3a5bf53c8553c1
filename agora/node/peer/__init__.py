"""What lives while the daemon works, whichever stages it holds."""
