"""Models: finding and loading them, running them layer by layer, capturing what reaches attention."""
