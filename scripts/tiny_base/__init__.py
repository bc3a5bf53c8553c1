"""`./scripts/tiny-base DIR`: makes a tiny base model, its tokenizer and example data, so that tuning needs no download.

Knows: the standard library's source, transformers. Must not know: peers, runs, manifests.
"""
