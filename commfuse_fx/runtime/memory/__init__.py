"""The memory of a step: flat storage, parts of divided parameters, and the tensors that users see of them."""
