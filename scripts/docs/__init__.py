"""What writes documentation: docs/results.md with its pictures, and README's table of architectures."""
