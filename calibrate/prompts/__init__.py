"""Prompts of exact token lengths, with needles, to calibrate, adjust and certify on."""
