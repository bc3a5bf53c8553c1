"""Which peer holds what, how far it is, and how it behaves: the view, placement, health, status, peer score.

The first lines of each module say whether it is pure or deterministic. In a deterministic module `now` is an argument,
and an object changes only itself, and only by the calls to it. Only `membership.py` and `directory_reader.py` have
effects.
"""
