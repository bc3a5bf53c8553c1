"""What a daemon keeps as long as it holds a span: its stages, weights and training data."""
