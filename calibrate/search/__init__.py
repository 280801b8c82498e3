"""Second stage: what every layer does at every length, from its curves and measured times."""
