"""Shapes of public models, as fields of `model`; said here and nowhere else."""

# Llama 3.2 1B and Llama 3.1 8B, as the config.json of their release has them.
# Its rope scaling is left out: it stretches a context of 8,192 afterwards.
_LLAMA3 = {
  "num_heads": 32,
  "num_kv_heads": 8,
  "rope_theta": 500_000.0,
  "norm_eps": 1e-5,
}
LLAMA = {
  "1b": {
    **_LLAMA3,
    "num_layers": 16,
    "embed_dim": 2048,
    "head_dim": 64,
    "rotary_dim": 64,
    "mlp_dim": 8192,
    "tied": True,
  },
  "8b": {
    **_LLAMA3,
    "num_layers": 32,
    "embed_dim": 4096,
    "head_dim": 128,
    "rotary_dim": 128,
    "mlp_dim": 14_336,
    "tied": False,
  },
}
LLAMA_VOCAB = 128_256
