"""Optional: fine-tuning of Hugging Face models, on samples. No package of pretraining imports it."""
