"""The process: how a daemon starts, runs and leaves."""
