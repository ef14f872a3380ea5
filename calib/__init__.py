"""Ranges for quantisation, collected along the trajectories that decoding really visits."""
