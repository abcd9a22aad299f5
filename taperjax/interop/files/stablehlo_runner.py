"""Continues token ids greedily: python runner.py FOLDER 32 5,7,9 1,2

Prints one line of new ids for each prompt. Needs jax and safetensors only.
"""

import json
import pathlib
import sys

import jax
import numpy as np
from jax import export

folder, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
prompts = [[int(i) for i in text.split(",")] for text in sys.argv[3:]]
page = json.loads((folder / "model.json").read_text())
length = np.array([len(prompt) for prompt in prompts], np.int32)
if length.max() + count > page["context_len"]:
  sys.exit(f"prompt and new ids exceed {page['context_len']} positions")
if not all(0 <= i < page["vocab_size"] for i in sum(prompts, [])):
  sys.exit(f"ids must lie in 0..{page['vocab_size'] - 1}")
weights = ()
if page["weights"] == "arguments":
  from safetensors.numpy import load_file
  weights = (jax.device_put(load_file(folder / "model.safetensors")),)
prefill, decode = (
  jax.jit(export.deserialize((folder / f"{name}.jax_export").read_bytes()).call)
  for name in ("prefill", "decode")
)
tokens = np.zeros((len(prompts), length.max()), np.int32)  # padded right
for row, prompt in zip(tokens, prompts, strict=True):
  row[: len(prompt)] = prompt
logits, cache = prefill(*weights, tokens, length)
new = [np.argmax(logits, axis=-1).astype(np.int32)]
while len(new) < count:
  position = length + np.int32(len(new) - 1)
  logits, cache = decode(*weights, new[-1], position, cache)
  new.append(np.argmax(logits, axis=-1).astype(np.int32))
for row in np.stack(new, axis=1).tolist():
  print(",".join(map(str, row)))
