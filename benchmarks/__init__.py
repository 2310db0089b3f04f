"""Benchmarks: one package a topic, run with ``python -m benchmarks.TOPIC`` from the repository."""
