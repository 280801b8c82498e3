"""Calibrated profiles afterwards: another budget, and tiles for another GPU."""
