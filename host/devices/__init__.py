"""One file per way to run a program."""
