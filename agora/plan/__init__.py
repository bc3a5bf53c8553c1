"""Plans which machine should hold which stages: costs of stages, abilities of machines, the best way to share work.

Everything here but `profile` is pure: no torch, no clock, no network.
"""
