"""A microbatch's way through the swarm: the origin that draws it, the hops that compute it, the routes between them.

Knows: microbatches, stages, peers, deadlines. Must not know: how tensors are computed (no torch, nothing of train), or
how bytes travel (nothing of net). Both are passed in as protocols: see interfaces.py and agora/calls.py.
"""
