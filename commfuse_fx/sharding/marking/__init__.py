"""Marking: the marks with which users say how a model is divided, and ready-made plans of marks."""
