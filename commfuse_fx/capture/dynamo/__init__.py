"""A graph that Dynamo has made, as a model of its own."""
