"""First stage: error and density against threshold for every head, and what each setting costs."""
