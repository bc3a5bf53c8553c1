"""The daemon: where its files are, how it starts, serves, answers on its socket and leaves.

Imports nothing by itself, so that the commands can use `paths` and `control_client` without torch or hivemind.
"""
