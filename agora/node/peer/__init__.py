"""What lives as long as the daemon, whatever span it holds."""
