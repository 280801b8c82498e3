"""Studies of the certificate: how often its claims hold, on made-up losses and on fresh prompts of a model."""
