"""What two peers of a run must agree on: identities, the manifest, invites, records, frames and messages.

Knows nothing of sockets, clocks, tensor libraries or the rest of agora: bytes and numbers come in, bytes and typed
objects come out, and `now` is always an argument. Only identity.py reads and writes a file, the key file.
protocol/SPEC.md says the same in prose.
"""

__version__ = "0.1.0"
