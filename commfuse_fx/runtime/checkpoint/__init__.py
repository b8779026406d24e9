"""What a checkpoint of a step consists of: which parts of tensors a rank has, who writes them, files and folders."""
