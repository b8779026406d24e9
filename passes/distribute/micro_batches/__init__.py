"""Passes for steps of several calls: gradients are held, added and averaged."""
