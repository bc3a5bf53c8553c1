"""A microbatch's way through the swarm: the origin that draws it, the hops that compute it, the routes between them.

The worker that computes and the network are passed in: see MicrobatchWorker in hop.py and PeerCaller in
agora/core/calls.py.
"""
