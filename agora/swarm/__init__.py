"""Who is where, how far, and how it behaves: the membership view, placement, health, status and conduct.

Knows: signed records, offences, and what follows from them. Must not know: torch, nor how microbatches travel. All but
`membership.py` and `offences.py` is pure: `decide(now, view, config) -> (action, reason)`.
"""
