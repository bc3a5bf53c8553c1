"""Plans which machine should hold which stages: what stages cost, what machines can do, and the best way to share work.

Everything here but `profile` is pure: no torch, no clock, no network.
"""
