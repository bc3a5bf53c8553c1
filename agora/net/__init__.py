"""Bytes between peers: the libp2p host, multiplexed calls on long-lived streams, the DHT directory, the light client.

Knows libp2p and agora_protocol. Must not know torch, stages' weights, or why peers call each other. Nothing is imported
here: `light` and `host` use two libp2p implementations that cannot be in one process.
"""
