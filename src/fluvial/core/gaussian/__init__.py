"""Gaussian paths, fields along them, and the flow's ordinary differential equation."""
