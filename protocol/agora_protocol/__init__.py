"""What two peers of a run must agree on: identities, the manifest, invites, records, frames and messages.

Only identity.py reads and writes a file, the key file.
protocol/SPEC.md says the same in prose.
"""
