"""What lives as long as a span: its stages, weights and training data."""
