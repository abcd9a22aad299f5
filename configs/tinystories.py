"""TinyStories pre-training, arXiv:2602.10408 (v1), section 5.1, Tables 1, 2, 5.

  python train.py --config configs/tinystories.py:30m,internal_aux

Argument: SIZE,VARIANT. Sizes 1m, 3m, 9m, 30m; variants baseline, internal,
internal_aux, final, all, all_aux; and vanilla (baseline by another name) and
fakeln (Baroni et al. 2025). With the defaults the official text is
downloaded (2 GB); `--config.data.train=FILE --config.data.valid=FILE` takes
local files instead. Everything but the variant is identical between the
variants of one size; [U] marks what the paper does not say. The full runs of
Table 5 take days on a GPU and were not made; the README has a table of short
ones on two cores (1m, 1,000 steps, loss 4.07 to 4.53, ten minutes each).
"""

from ml_collections import config_dict

WIDTHS = {"1m": 64, "3m": 128, "9m": 256, "30m": 512}
STEPS = {"1m": 500_000, "3m": 500_000, "9m": 750_000, "30m": 1_000_000}


def get_config(arg: str = "1m,internal_aux") -> config_dict.ConfigDict:
  """Config of "SIZE,VARIANT", or "SIZE" alone for the authors' default."""
  size, _, variant = arg.partition(",")
  if size not in WIDTHS:
    raise ValueError(
      f"configs/tinystories.py:{arg} names size {size!r}; "
      f"use one of {', '.join(WIDTHS)}"
    )
  c = config_dict.ConfigDict()
  c.size = size  # a label, in summary.json
  c.variant = variant or "internal_aux"  # Table 1
  c.norm = "rms"  # or "layer"
  c.seeds = (0,)  # the paper has six
  c.steps = STEPS[size]  # Table 5
  c.batch_size = 16  # windows; section 5.1
  c.micro_batches = 1  # parts of the batch walked one after the other
  c.context_len = 512  # tokens; section 5.1
  c.compute_dtype = "float32"  # or "bfloat16"; [U], ours
  c.log_every = 10  # steps
  # A step that is not finite stops the run; "skip" leaves all but the gate as
  # it was and goes on, and stops after ten such steps in a row.
  c.nonfinite = "stop"

  c.model = m = config_dict.ConfigDict()
  m.num_layers = 8  # section 5.1
  m.embed_dim = WIDTHS[size]
  m.num_heads = 16  # at every width
  m.num_kv_heads = config_dict.placeholder(int)  # None: num_heads
  m.head_dim = config_dict.placeholder(int)  # None: embed_dim / num_heads
  m.mlp = "swiglu"  # or "gelu_tanh", "gelu"
  m.mlp_dim = config_dict.placeholder(int)  # None: 8 d / 3, a multiple of 8
  m.positions = "rope"  # or "learned"
  m.rope_theta = 10_000.0  # [U], the usual base
  m.rotary_dim = config_dict.placeholder(int)  # None: head_dim
  m.norm_eps = 1e-6  # inside the root; [U], ours
  m.biases = ()  # of q, k, v, o, gate, up, down, head
  m.tied = True  # head = embedding
  m.init_std = 0.02  # embedding from Fig. 3, the rest [U], ours
  m.scan_layers = False  # one compiled block for all layers
  m.remat = False  # less memory: the backward pass computes blocks once more

  c.taper = t = config_dict.ConfigDict()
  t.start = 0.05  # share of the steps; section 5.1
  t.end = 1.0  # share of the steps: g = 0 at the last one
  t.ema_rate = config_dict.placeholder(float)  # None: 0.01, short runs 0.1
  t.scale_loss_weight = 0.1  # lambda; appendix C
  # Ablations; the paper has the first value of each.
  t.shape = "cosine"  # of the gate; or "linear", or "step": 0 from the end on
  t.calibrate = True  # False: c = 1
  t.train_gain = True  # False: gamma~ stays as it was copied
  t.scale_loss_schedule = "constant"  # or "taper": lambda (1 - g)
  # Sites that taper, of those of the variant; None: all of them. Names as
  # `taperjax probe` has them, or attn_norm, mlp_norm, final_norm for a kind.
  t.sites = config_dict.placeholder(tuple)

  # variant=fakeln: hard cuts, Baroni et al. 2025, in steps. Values of their
  # GPT-2 small, for fine-tuning; a run from scratch starts far later.
  c.fakeln = f = config_dict.ConfigDict()
  f.start = 20  # last step before the first cut
  f.gap_mlp = 2  # between the cuts of two MLP norms; then
  f.gap_qk = 2  # of two attention norms for q and k; then
  f.gap_v = 3  # for v; then the final norm
  f.eot_after = 2  # then end-of-text tokens are like others; then
  f.position0_after = 10  # position 0 is
  f.momentum = 0.9  # weight of the old running mean

  c.optimizer = o = config_dict.ConfigDict()
  o.learning_rate = 3e-4  # peak; section 5.1
  o.final_learning_rate = 0.0
  o.warmup = 0.05  # share of the steps
  o.b1 = 0.9
  o.b2 = 0.95
  o.eps = 1e-8  # [U], the library default
  o.weight_decay = 0.0
  o.clip_norm = 1.0  # global norm

  c.data = d = config_dict.ConfigDict()
  # Or tinystories-v2, tfds:NAME/SPLIT, corpus, alphabet, a file.
  d.train = "tinystories"
  d.valid = "tinystories"
  d.tokenizer = "sentencepiece"  # or "bytes", or a path to a tokenizer.json
  d.vocab_size = config_dict.placeholder(int)  # None: the tokenizer's own
  d.vocab_size = 10_000  # special pieces included
  # Tokens and downloads; None: in the workdir. Give a folder to share the
  # official text, 2 GB, among runs.
  d.folder = config_dict.placeholder(str)
  d.corpus_stories = config_dict.placeholder(int)  # of "corpus" only

  c.eval = e = config_dict.ConfigDict()
  e.every = config_dict.placeholder(int)  # steps; None: a fifth of the run,
  # 1,000 at most
  e.batch_size = 16  # windows
  e.max_windows = config_dict.placeholder(int)  # None: the whole text
  e.prompt = "Once upon a time"
  e.sample_tokens = 100

  c.checkpoint = k = config_dict.ConfigDict()
  k.every = config_dict.placeholder(int)  # as eval.every
  c.init = config_dict.ConfigDict()
  c.init.checkpoint = config_dict.placeholder(str)  # see configs/llama.py
  c.lora = config_dict.ConfigDict()
  c.lora.rank = 0  # off
  c.lora.alpha = 16.0  # adapters are scaled by alpha / rank
  c.lora.targets = ("q", "k", "v", "o", "gate", "up", "down")
  # Devices by axis; their product is the number of devices (or 1: one of them).
  c.mesh = h = config_dict.ConfigDict()
  h.seed = 1  # splits the seeds
  h.data = 1  # splits the batch
  h.fsdp = 1  # splits the batch, and the parameters
  h.tensor = 1  # splits heads and MLP of each layer
  # A final taper folds into the head, which is untied from the embedding.
  c.fold = config_dict.ConfigDict({"untie": True})
  return c
