"""Makalu: an open, synthesizable, cycle-accurate Trainium-like NeuronCore and its software."""

__version__ = "0.1.0"
