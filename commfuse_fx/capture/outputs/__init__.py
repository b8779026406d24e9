"""Which gradients a caller asks for, of which outputs."""
