"""Turns text into samples: sources of text, tokenizers, the token cache, sampling."""
