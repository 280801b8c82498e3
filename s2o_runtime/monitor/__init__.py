"""What watches layers while they run, whichever program runs them: errors, times, densities, and why they are dense."""
