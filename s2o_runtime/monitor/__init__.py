"""Measurements of layers while they run, whichever program runs them: errors, times, densities, reasons for dense."""
