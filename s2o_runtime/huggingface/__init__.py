"""transformers: patching models, running programs unedited, metering and checking layers."""
