"""Turns text into samples: sources of text, tokenizers, the token cache, sampling.

Knows: files, token ids. Must not know: torch, models, the network.
"""
