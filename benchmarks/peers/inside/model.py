"""Where a model's GGUF file is, and what a step costs with it at least.

    model.py MODEL

Prints an object: "path"; "row_products", the multiply-adds of one row; "draw_products", how many more where a token is
drawn from it; and "weight_bytes", which every step reads.
"""

from __future__ import annotations

import json
import sys

from chairlift import models
from chairlift.models.gguf import GGUFFile


def main(model: str) -> None:
    path = models.resolve(model)
    tensors = GGUFFile(path).tensors
    head = tensors.get("output.weight", tensors["token_embd.weight"])
    layers = [tensor for name, tensor in tensors.items() if name.startswith("blk.") and len(tensor.shape) == 2]
    found = {
        "row_products": sum(tensor.shape[0] * tensor.shape[1] for tensor in layers),
        "draw_products": head.shape[0] * head.shape[1],
        "weight_bytes": sum(tensor.data.nbytes for tensor in (*layers, head)),
    }
    print(json.dumps({"path": str(path), **found}))


main(sys.argv[1])
