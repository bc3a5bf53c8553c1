"""Which peer holds what, how far it is, and how it behaves: the membership view, placement, health, status, conduct.

The
first lines of each module say whether it is pure or deterministic; an object of a deterministic module changes only
itself, and only by the calls to it, and `now` is an argument. Only `membership.py`, `directory_reader.py` and
`violations.py` have effects.
"""
