"""Measurements of gemmgen against the ladder of everything else that computes the same function: `python -m bench`."""
