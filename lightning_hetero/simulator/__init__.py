"""Predictions: pure Python, no torch."""
