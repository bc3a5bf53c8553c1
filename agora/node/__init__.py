"""The daemon: where its things live, how it starts, serves, answers on its socket and leaves.

Knows: every room. Must not know: command lines (cli) and how any room does its work. This package imports nothing by
itself, so that the commands can use `paths` and `control_client` without torch or hivemind.
"""
