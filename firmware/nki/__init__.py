"""The kernel language: a module shaped like AWS NKI, traced into engine instructions."""
