"""The command line: parse first, import later. `--help` loads no torch."""
