"""The host side: device, tensors, program loading, matmul offload, command line."""
