"""Running the model once and writing down what it does, as one graph in an order of its own."""
