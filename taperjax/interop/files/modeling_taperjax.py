"""A decoder-only transformer whose normalization layers may be absent.

Made by taperjax for transformers 5 (written against 5.24); it needs torch and
transformers alone. A norm that was folded into the weights is an identity here.

Axes: B batch, L query length, H heads, G key/value heads, K head size.
"""

import math

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import (
  BaseModelOutputWithPast,
  CausalLMOutputWithPast,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class TaperjaxConfig(PreTrainedConfig):
  """Shape of the model; `biases` names the projections that have one."""

  model_type = "taperjax"
  keys_to_ignore_at_inference = ["cache"]

  vocab_size: int = 0
  hidden_size: int = 0
  intermediate_size: int = 0
  num_hidden_layers: int = 0
  num_attention_heads: int = 1
  num_key_value_heads: int = 1
  head_dim: int = 0
  max_position_embeddings: int = 0
  mlp: str = "swiglu"  # or "gelu_tanh", "gelu"
  norm: str = "rms"  # or "layer"
  norm_eps: float = 1e-6
  internal_norm: bool = False  # whether the blocks' norms are there
  final_norm: bool = False
  positions: str = "rope"  # or "learned"
  rotary_dim: int = 0
  rotary_base: float = 10_000.0
  rotary_scaling: dict | None = None  # kind "linear" or "llama3"
  biases: list[str] | tuple[str, ...] = ()
  tie_word_embeddings: bool = False
  use_cache: bool = True
  bos_token_id: int | None = None
  eos_token_id: int | list[int] | None = None
  pad_token_id: int | None = None
  initializer_range: float = 0.02


def rotary_frequencies(config, device):
  """Angle by which each pair of coordinates turns for one position."""
  size, base = config.rotary_dim, config.rotary_base
  i = torch.arange(0, size, 2, dtype=torch.float32, device=device)
  frequency = base ** (-i / size)
  scaling = config.rotary_scaling
  if scaling is None:
    return frequency
  if scaling["kind"] == "linear":
    return frequency / scaling["factor"]
  if scaling["kind"] != "llama3":
    raise ValueError(f"rotary_scaling={scaling} is neither linear nor llama3")
  # Turns within the original context: few are slowed down, many are kept.
  turns = scaling["original_context"] * frequency / (2 * math.pi)
  low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
  share = ((turns - low) / (high - low)).clamp(0, 1)
  return ((1 - share) / scaling["factor"] + share) * frequency


def rotate(x_BHLK, cos_BL, sin_BL):
  """Turns coordinate i with i + R / 2 of the first R; the rest passes."""
  half = cos_BL.shape[-1]
  x = x_BHLK.float()
  a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
  cos, sin = cos_BL[:, None], sin_BL[:, None]
  turned = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
  return turned.to(x_BHLK.dtype)


def eager_attention(
  module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs
):
  """softmax(q k) v by hand, softmax in float32; dropout is not ours."""
  key = key.repeat_interleave(module.num_key_value_groups, dim=1)
  value = value.repeat_interleave(module.num_key_value_groups, dim=1)
  scores = query @ key.transpose(2, 3) * scaling
  if attention_mask is not None:
    scores = scores + attention_mask
  weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
  return (weights @ value).transpose(1, 2).contiguous(), weights


class TaperjaxAttention(nn.Module):
  def __init__(self, config, layer_idx):
    super().__init__()
    self.config, self.layer_idx = config, layer_idx
    self.head_dim = config.head_dim
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    self.num_key_value_groups = heads // groups
    self.scaling = self.head_dim**-0.5
    self.is_causal = True
    width, size = config.hidden_size, self.head_dim
    linear = lambda n, *shape: nn.Linear(*shape, bias=n in config.biases)
    self.q_proj = linear("q", width, heads * size)
    self.k_proj = linear("k", width, groups * size)
    self.v_proj = linear("v", width, groups * size)
    self.o_proj = linear("o", heads * size, width)

  def forward(self, x, turns, attention_mask, cache, **kwargs):
    shape = (*x.shape[:-1], -1, self.head_dim)
    q = self.q_proj(x).view(shape).transpose(1, 2)
    k = self.k_proj(x).view(shape).transpose(1, 2)
    v = self.v_proj(x).view(shape).transpose(1, 2)
    if turns is not None:
      q, k = rotate(q, *turns), rotate(k, *turns)
    if cache is not None:
      k, v = cache.update(k, v, self.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(
      self.config._attn_implementation, eager_attention
    )
    out, _ = attend(
      self, q, k, v, attention_mask, scaling=self.scaling, dropout=0.0, **kwargs
    )
    return self.o_proj(out.reshape(*x.shape[:-1], -1).contiguous())


class TaperjaxMLP(nn.Module):
  def __init__(self, config):
    super().__init__()
    width, hidden = config.hidden_size, config.intermediate_size
    linear = lambda n, *shape: nn.Linear(*shape, bias=n in config.biases)
    self.gated = config.mlp == "swiglu"
    if self.gated:
      self.gate_proj = linear("gate", width, hidden)
    self.up_proj = linear("up", width, hidden)
    self.down_proj = linear("down", hidden, width)
    approximate = "tanh" if config.mlp == "gelu_tanh" else "none"
    self.act = nn.SiLU() if self.gated else nn.GELU(approximate)

  def forward(self, x):
    if self.gated:
      return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
    return self.down_proj(self.act(self.up_proj(x)))


def make_norm(config, present):
  """A norm, or nothing at all where it was folded."""
  if not present:
    return nn.Identity()
  kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
  return kind(config.hidden_size, eps=config.norm_eps)


class TaperjaxBlock(nn.Module):
  def __init__(self, config, layer_idx):
    super().__init__()
    self.input_layernorm = make_norm(config, config.internal_norm)
    self.self_attn = TaperjaxAttention(config, layer_idx)
    self.post_attention_layernorm = make_norm(config, config.internal_norm)
    self.mlp = TaperjaxMLP(config)

  def forward(self, h, turns, attention_mask, cache, **kwargs):
    x = self.input_layernorm(h)
    h = h + self.self_attn(x, turns, attention_mask, cache, **kwargs)
    return h + self.mlp(self.post_attention_layernorm(h))


class TaperjaxPreTrainedModel(PreTrainedModel):
  config_class = TaperjaxConfig
  base_model_prefix = "model"
  _no_split_modules = ["TaperjaxBlock"]
  _supports_attention_backend = True
  _supports_flash_attn = True
  _supports_sdpa = True
  _supports_flex_attn = True


class TaperjaxModel(TaperjaxPreTrainedModel):
  """Token ids to the input of the head."""

  def __init__(self, config):
    super().__init__(config)
    self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
    if config.positions == "learned":
      self.embed_positions = nn.Embedding(
        config.max_position_embeddings, config.hidden_size
      )
    self.layers = nn.ModuleList(
      TaperjaxBlock(config, n) for n in range(config.num_hidden_layers)
    )
    self.norm = make_norm(config, config.final_norm)
    self.post_init()

  def forward(
    self, input_ids=None, attention_mask=None, position_ids=None, cache=None,
    inputs_embeds=None, use_cache=None, **kwargs,
  ):
    h = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
    if use_cache is None:
      use_cache = self.config.use_cache
    if use_cache and cache is None:
      cache = DynamicCache(config=self.config)
    length = h.shape[1]
    if position_ids is None:
      if attention_mask is not None and attention_mask.ndim == 2:
        # Padding on the left has no position.
        position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        position_ids = position_ids[:, -length:]
      else:
        past = 0 if cache is None else cache.get_seq_length()
        position_ids = torch.arange(past, past + length, device=h.device)[None]
    mask = create_causal_mask(
      config=self.config,
      inputs_embeds=h,
      attention_mask=attention_mask,
      cache=cache,
      position_ids=position_ids,
    )
    turns = None
    if self.config.positions == "learned":
      h = h + self.embed_positions(position_ids)
    else:
      frequency = rotary_frequencies(self.config, h.device)
      angle = position_ids[..., None].float() * frequency
      turns = (angle.cos(), angle.sin())
    for layer in self.layers:
      h = layer(h, turns, mask, cache, position_ids=position_ids, **kwargs)
    return BaseModelOutputWithPast(last_hidden_state=self.norm(h), cache=cache)


class TaperjaxForCausalLM(TaperjaxPreTrainedModel, GenerationMixin):
  _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

  def __init__(self, config):
    super().__init__(config)
    self.model = TaperjaxModel(config)
    self.lm_head = nn.Linear(
      config.hidden_size, config.vocab_size, bias="head" in config.biases
    )
    self.post_init()

  def forward(
    self, input_ids=None, attention_mask=None, position_ids=None, cache=None,
    labels=None, logits_to_keep=0, **kwargs,
  ):
    out = self.model(input_ids, attention_mask, position_ids, cache, **kwargs)
    keep = logits_to_keep
    keep = slice(-keep, None) if isinstance(keep, int) else keep
    logits = self.lm_head(out.last_hidden_state[:, keep])
    loss = None
    if labels is not None:
      loss = self.loss_function(logits, labels, self.config.vocab_size)
    return CausalLMOutputWithPast(loss=loss, logits=logits, cache=out.cache)
