"""transformers: patching models, and running programs unedited."""
