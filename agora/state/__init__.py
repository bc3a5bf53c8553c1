"""What lasts: checkpoints on disk, copies for those who join, states on their way between replicas, weights in files.

Knows arrays, names, hashes, files, and calls that others carry. Must not know torch, the network, or who is where.
"""
