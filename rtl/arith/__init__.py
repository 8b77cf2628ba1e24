"""Number hardware: operand conversion, fused multiply-add, binary32 add, casts. Pure data path."""
