"""The intermediate representation: one torch.fx graph of a training step, with typed metadata."""
