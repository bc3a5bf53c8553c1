"""Reports what happens in a daemon: a closed list of typed events, and the places where they are written.

Knows: the event list, the log, the journal, the counters, the named fault points of the tests.
Must not know: torch, hivemind, the network, or why anything happens. A log line is never an input.
"""
