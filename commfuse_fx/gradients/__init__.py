"""What becomes of gradients between autograd and the ranks: parts, hooks, uneven batches, kept forwards."""
