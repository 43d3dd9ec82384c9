"""The one training loop, and its files."""
