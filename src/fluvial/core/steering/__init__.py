"""Ways to bend a simulation."""
