"""Linear operators: what is measured of a state, its adjoint and its pseudo-inverse."""
