"""The demo model: its corpus and its training."""
