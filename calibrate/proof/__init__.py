"""Third stage: held-out prompts through the patched model, tightened where a limit is broken."""
