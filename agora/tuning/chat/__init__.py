"""Samples: records of a data file to conversations, text, supervised tokens, and packed rows. No torch."""
