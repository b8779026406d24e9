"""Passes that merge collectives and decide what memory they use."""
