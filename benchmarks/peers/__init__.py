"""Chairlift and other engines side by side, on fixed requests. The command is benchmarks/peers.py."""
