"""What the machine's owner allows: memory, disk, hours, pauses."""
