"""Owns the what-if page of ``moesim ui``."""
