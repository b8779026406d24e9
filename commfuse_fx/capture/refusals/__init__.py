"""What a model may not do while it is traced, with an error or a warning that says why."""
