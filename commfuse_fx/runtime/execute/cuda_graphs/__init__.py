"""Steps that are captured in CUDA graphs."""
