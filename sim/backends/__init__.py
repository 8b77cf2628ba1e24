"""How a design is built and stepped by each simulator."""
