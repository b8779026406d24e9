"""Which collectives are merged, cut and sent when."""
