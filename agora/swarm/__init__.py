"""Which peer holds what, how far it is, and how it behaves: the membership view, placement, health, status, conduct.

Knows: signed records, offences, and what follows from them. Must not know: torch, nor how microbatches travel. View,
placement, health and status are pure: `decide(now, view, config) -> (action, reason)`. `conduct.py` is deterministic: a
Conduct changes only itself, and only by the calls to it; `now` is an argument. Only `membership.py` and `offences.py`
have effects.
"""
