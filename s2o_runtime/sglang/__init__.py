"""S2O as an attention backend of SGLang; only functions of `engine` and `plugin` import SGLang."""
