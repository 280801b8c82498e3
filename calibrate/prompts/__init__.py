"""What is calibrated and proven on: prompts of exact token lengths, with needles."""
