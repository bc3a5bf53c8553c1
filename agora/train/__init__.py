"""What happens on this peer's compute device: its queue, the stages of its span, gradients, optimizer steps."""
