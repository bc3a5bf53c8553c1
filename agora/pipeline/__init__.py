"""A microbatch's way through the swarm: origin, hop, routing, credit, result cache.

Knows microbatches, stages, peers and deadlines. Must not know how tensors are computed (no torch, nothing of train)
nor how bytes travel (nothing of net): both come in through protocols, see `interfaces.py` and `agora/calls.py`.
"""
