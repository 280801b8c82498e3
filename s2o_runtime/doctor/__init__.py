"""s2o-doctor: what is installed here, whether the kernels compute what they should, and what a profile would run."""
