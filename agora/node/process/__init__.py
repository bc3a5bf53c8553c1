"""The process: how a daemon starts, runs, answers its owner and leaves."""
