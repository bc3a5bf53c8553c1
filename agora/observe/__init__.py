"""Reports what happens in a daemon: a closed list of typed events, and the places where they are written.

A log line is never an input.
"""
