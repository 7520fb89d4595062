"""Long-sequence log-probability and loss: Triton on GPU, chunked torch on CPU, one float64 reference."""
