"""Who averages a part, and who when that one fails: weighted rendezvous hashing. Pure."""
