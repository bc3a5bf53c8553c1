"""A microbatch's way through the swarm: the origin that draws it, the hops that compute it, the routes between them.

Both are passed in as protocols: see interfaces.py and agora/core/calls.py.
"""
