"""Runs in the environment `export`: weights for peers that cannot read a GGUF file as it is.

export_model.py f32 MODEL.gguf FOLDER          a Hugging Face checkpoint with the same weights in F32
export_model.py openvino CHECKPOINT FOLDER     a checkpoint as an OpenVINO IR, its weights still in F32
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def dequantise(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).save_pretrained(folder)
    tokenizer_of(gguf).save_pretrained(folder)


def tokenizer_of(gguf: Path) -> Any:
    """The file's byte-level BPE, split as SmolLM2 does. (transformers takes that of every Llama for SentencePiece.)"""
    from gguf import GGUFReader
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields
    tokens, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    end = tokens[fields["tokenizer.ggml.eos_token_id"].contents()]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


def to_openvino(checkpoint: Path, folder: Path) -> None:
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    task = "text-generation-with-past"
    main_export(str(checkpoint), folder, task=task, framework="pt", ov_config=OVConfig(dtype="fp32"))


if __name__ == "__main__":
    kind, source, made = sys.argv[1:]
    {"f32": dequantise, "openvino": to_openvino}[kind](Path(source), Path(made))
