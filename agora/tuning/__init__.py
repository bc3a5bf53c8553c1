"""Optional: fine-tuning of Hugging Face models. Pretraining never imports it."""
