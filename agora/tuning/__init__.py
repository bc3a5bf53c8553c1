"""Optional: fine-tuning of Hugging Face models, on samples. Pretraining never imports it."""
