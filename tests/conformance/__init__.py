"""An independent peer against a real daemon."""
