"""Forms of parts of torch that can be traced, put in their place while a model is traced."""
