"""Opens this folder in TransformerLens 4: bridge = load(FOLDER).

The norms that were folded are identities, so the stream is linear: every head
and MLP output goes straight to the logits, behind the final norm if one is
left (`ln_final`). Rotary pairs are adjacent here, as TransformerLens wants it.
"""

import json
import pathlib

import torch
from safetensors.torch import load_file
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import native  # noqa: F401


def load(folder, dtype=torch.float32, n_ctx=None):
  """A TransformerBridge; a smaller n_ctx saves memory (n_ctx^2 a layer)."""
  folder = pathlib.Path(folder)
  page = json.loads((folder / "transformer_lens.json").read_text())
  tensors = load_file(folder / "model.safetensors")
  tensors.setdefault("unembed.weight", tensors["embed.weight"])  # tied
  n_ctx = n_ctx or page["cfg"]["n_ctx"]
  if "pos_embed.weight" in tensors:
    tensors["pos_embed.weight"] = tensors["pos_embed.weight"][:n_ctx]
  cfg = TransformerBridgeConfig(**{**page["cfg"], "n_ctx": n_ctx})
  cfg.rope_scaling = page["rope_scaling"]  # no argument of the class
  bridge = TransformerBridge.boot_native(cfg, dtype=dtype)
  if page["final_layer_norm"]:  # the native final norm is an RMSNorm
    norm = torch.nn.LayerNorm(cfg.d_model, eps=cfg.eps, dtype=dtype)
    bridge.ln_final.set_original_component(norm)
  for name in tensors:  # gated MLPs have no biases natively
    if name.endswith(".bias") and ".mlp." in name:
      linear = bridge.get_submodule(name[:-5]).original_component
      bias = torch.zeros(linear.out_features, dtype=dtype)
      linear.bias = torch.nn.Parameter(bias)
  bridge.load_state_dict(tensors)
  return bridge
