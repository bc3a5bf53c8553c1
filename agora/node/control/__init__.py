"""What a daemon says of itself, and how other processes of this machine ask it."""
