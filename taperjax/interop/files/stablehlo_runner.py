"""Continues token ids greedily: python runner.py FOLDER 32 5,7,9 1,2

Prints a line of new ids for each prompt. Needs jax alone, and flatbuffers,
without which jax does not read its artifacts.
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
length = np.array([*map(len, prompts)], np.int32)
if max(length) + count > page["context_len"]:
  sys.exit(f"prompt and new ids exceed {page['context_len']} positions")
if not all(0 <= i < page["vocab_size"] for i in sum(prompts, [])):
  sys.exit(f"ids must lie in 0..{page['vocab_size'] - 1}")
read = lambda name: (folder / f"{name}.jax_export").read_bytes()
load = lambda name: jax.jit(export.deserialize(read(name)).call)
prefill, decode = load("prefill"), load("decode")
weights = ()
if page["weights"] == "arguments":  # a file: length of the JSON, JSON, numbers
  raw = memoryview((folder / "model.safetensors").read_bytes())
  start, weights = 8 + int.from_bytes(raw[:8], "little"), ({},)
  for name, told in json.loads(bytes(raw[8:start])).items():
    if name != "__metadata__":
      a, b = (start + offset for offset in told["data_offsets"])
      x = np.frombuffer(raw[a:b], jax.numpy.dtype(page["dtype"]))
      weights[0][name] = jax.device_put(x.reshape(told["shape"]))
tokens = [prompt + [0] * (max(length) - len(prompt)) for prompt in prompts]
logits, cache = prefill(*weights, np.array(tokens, np.int32), length)
new = [np.argmax(logits, axis=-1).astype(np.int32)]
for i in range(count - 1):
  logits, cache = decode(*weights, new[-1], length + np.int32(i), cache)
  new.append(np.argmax(logits, axis=-1).astype(np.int32))
print("\n".join(",".join(map(str, row)) for row in np.stack(new, 1).tolist()))
