"""Seeded random worlds for the scheduler: what is drawn, the answers that must come, one run, and the search for the
smallest world that still fails. See ``test_worlds.py``."""
