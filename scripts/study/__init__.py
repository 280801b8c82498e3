"""Studies of design decisions: what the extensions of the method are worth, and what a budget costs."""
