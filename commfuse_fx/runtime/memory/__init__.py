"""The memory of a step: flat storage, parts of divided parameters, and what users see of them."""
