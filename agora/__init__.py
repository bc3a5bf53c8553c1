"""Agora: many parties train one model over ordinary internet links, with no coordinator.

This package is the daemon and its commands; what two peers must agree on lives beside it, in `agora_protocol`.
"""

__version__ = "0.1.0"
