"""Chairlift and other engines side by side on the same requests, the same weights and the same machine.

    python benchmarks/peers.py [--engines NAMES] [--workloads NAMES] [--rounds 5] [--output build/peers]

Installs each peer in an environment of its own (once; llama.cpp is built, which takes a quarter of an hour), compares
its text with that of the dequantised model, then measures all engines in turn, round after round, and prints medians,
Chairlift's ratio to the best peer and whether the target is met. Writes OUTPUT.json, with every run, and OUTPUT.md.

Chairlift and the peers that have a server are measured through it, by the same streaming client on the same machine.
OpenVINO GenAI has none: it is measured in process, spared HTTP and text. The targets are for the served Chairlift all
the same; `chairlift-in-process` is its equal pairing.

An engine that cannot be installed or run here is listed with the reason.
"""

from __future__ import annotations

from peers.command import main

if __name__ == "__main__":
    main(__doc__ or "")
