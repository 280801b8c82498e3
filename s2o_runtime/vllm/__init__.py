"""S2O as an attention backend of vLLM; only `flash` and functions of `engine` and `plugin` import vLLM."""
