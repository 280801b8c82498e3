"""Calibrated profiles afterwards: described, compared, changed, explained, kept in a catalogue."""
