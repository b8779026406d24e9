"""What users say about how a model is divided: marks, ready-made plans, and what they mean."""
