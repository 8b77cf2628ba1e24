"""The hardware: a Trainium-like NeuronCore in Amaranth. Import from the modules; see README.md."""
