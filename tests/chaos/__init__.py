"""Studies under fire: what is killed at random points, and what must hold afterwards."""
