"""Predict published training runs on mixed GPUs from published layer times."""
