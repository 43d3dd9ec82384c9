"""Gaussian paths, fields along them, and their samplers."""
