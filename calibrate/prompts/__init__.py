"""What is calibrated, adjusted and certified on: prompts of exact token lengths, with needles."""
