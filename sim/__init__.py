"""Simulators: the golden model, the Amaranth simulator, Verilator; the HBM they share."""
