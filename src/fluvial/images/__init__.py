"""Methods that generate images."""
