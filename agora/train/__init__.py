"""What happens on this peer's compute device: its queue, the stages of its span, gradients, optimizer steps.

Knows: torch, the model and the codec of the run. Must not know: peers, addresses, calls, where a boundary comes from.
"""
