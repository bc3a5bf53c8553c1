"""What a stage costs in operations, bytes and memory, on which machine. Pure."""
