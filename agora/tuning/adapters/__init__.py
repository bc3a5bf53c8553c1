"""LoRA, and linear layers whose frozen matrix is kept in bf16 or NF4."""
