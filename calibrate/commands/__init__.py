"""The command line: one module for each command, flags to results and exit codes."""
