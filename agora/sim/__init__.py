"""The daemon's own decisions on simulated machines, links, churn and faults; and the virtual time of the tests."""
