"""Base models of Hugging Face: which can be trained, their files, and how peers fetch tensors from each other."""
