"""Which peer holds what, how far it is, and how it behaves: the view, placement, health, status, peer score.

The first lines of each module say whether it is pure or deterministic. In a deterministic module time and
chance come in from outside, and an object changes only itself, and only by the calls to it. Only `membership.py` and
`directory_reader.py` call other peers.
"""
