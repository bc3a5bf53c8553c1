"""A microbatch's way through the swarm: the origin that draws it, the hops that compute it, the routes between them.

The device and the network are passed in: see SpanDevice in hop.py and PeerCaller in agora/core/calls.py.
"""
