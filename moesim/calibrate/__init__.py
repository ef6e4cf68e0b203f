"""A machine measured, or read from benchmark results, as a hardware profile."""
