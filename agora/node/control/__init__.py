"""A daemon's report of itself, and the socket on which other processes of this machine ask for it."""
