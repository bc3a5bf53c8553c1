"""Agora: many parties train one model over ordinary internet links, with no coordinator.

This package is the daemon and its commands; the package `agora_protocol` has what two peers must agree on.
"""

__version__ = "0.1.0"
SOFTWARE = f"agora {__version__}"  # as HELLO tells other peers
