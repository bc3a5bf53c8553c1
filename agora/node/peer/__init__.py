"""What a working daemon keeps, whichever stages it holds."""
