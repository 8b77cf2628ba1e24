"""The engines: tensor, vector and DMA."""
