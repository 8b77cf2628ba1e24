"""A simulator of its own: Amaranth designs as C that loops over lanes."""
