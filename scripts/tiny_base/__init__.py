"""`./scripts/tiny-base DIR`: makes a tiny base model, its tokenizer and example data.

So that tuning needs no download.
"""
