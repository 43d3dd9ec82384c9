"""Paths of discrete states (tokens, types, categories), predictions along them, and samplers."""
