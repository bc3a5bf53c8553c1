"""The libp2p process and its streams. Nothing else knows hivemind."""
