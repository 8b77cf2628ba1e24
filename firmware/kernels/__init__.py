"""The kernel library. Each kernel is an NKI-style function beside its numpy reference."""
