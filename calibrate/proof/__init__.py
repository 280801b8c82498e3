"""Third and fourth stage: layers are adjusted on prompts of their own, then the result is certified on others."""
