"""What lasts: files of weights, named, whole or not there at all."""
