"""The parts every method is made of: paths, fields, objectives, samplers, steering, scales."""
