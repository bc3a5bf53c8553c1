"""Who is where and how far: the membership view, placement, health and status.

Knows signed records and what follows from them. Must not know torch, nor how microbatches travel. Everything but
`membership.py` is pure: `decide(now, view, config) -> (action, reason)`.
"""
