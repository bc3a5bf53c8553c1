"""What a running daemon is asked on its socket, and answers."""
