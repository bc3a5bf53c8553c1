"""Bytes between peers: the libp2p host, multiplexed calls on long-lived streams, the DHT directory, the status client.

Nothing is imported here: `status_client` and `host` use two libp2p implementations that cannot be in one process.
"""
