"""A training step of PyTorch: our weights, batch and optimizer in its blocks.

The blocks are the class of transformers that our weights fit, with its fused
attention; the step is what one writes first: autocast where the compute dtype
is bfloat16, clipping, fused AdamW.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from taperjax import state as state_lib
from taperjax.config import Config
from taperjax.errors import UserError
from taperjax.interop import gpt2, hf_files, llama, verify

PEERS = ("torch", "torch-compile")


class Timer:
  """Network, optimizer and batch, of which `seconds` times one step.

  Attributes:
    first_loss: of the weights as they were given.
    first_step_s: seconds of the first step, with what it compiles.
    version: of the packages, and threads or the device.
  """

  def __init__(
    self, torch: Any, network: Any, config: Config, tokens_BL1: np.ndarray,
    compiled: bool,
  ):
    self.torch, self.config = torch, config
    self.device, self.version = verify.torch_device(torch)
    self.network = network.to(self.device).train()
    opt, weights = config.optimizer, list(network.parameters())
    self.optimizer = torch.optim.AdamW(
      [
        {"params": [w for w in weights if w.dim() > 1]},
        {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
      ],
      betas=(opt.b1, opt.b2), eps=opt.eps, weight_decay=opt.weight_decay,
      fused=True,
    )
    self.rate, self.steps = state_lib.make_schedule(config), 0
    tokens_BL1 = torch.tensor(tokens_BL1, dtype=torch.long, device=self.device)
    self.parts = tokens_BL1.chunk(config.micro_batches)

    def loss_fn(tokens_BL1):
      logits_BLV = network(tokens_BL1[:, :-1], use_cache=False).logits
      return torch.nn.functional.cross_entropy(
        logits_BLV.flatten(0, 1).float(), tokens_BL1[:, 1:].flatten()
      )

    self.loss_fn = torch.compile(loss_fn, dynamic=False) if compiled else (
      loss_fn
    )
    self.first_step_s = self.seconds()
    self.first_loss = self.loss

  def seconds(self) -> float:
    """Of one step, to its end; `loss` is that before the update."""
    self.steps += 1
    for group in self.optimizer.param_groups:
      group["lr"] = float(self.rate(self.steps))
    self._wait()
    begin = time.perf_counter()
    loss = self._step()
    self._wait()
    seconds = time.perf_counter() - begin
    self.loss = float(loss)
    return seconds

  def _wait(self) -> None:
    if self.device == "cuda":
      self.torch.cuda.synchronize()

  def _step(self) -> Any:
    torch, total = self.torch, 0.0
    self.optimizer.zero_grad()
    for part_BL1 in self.parts:
      with torch.autocast(
        self.device, torch.bfloat16,
        enabled=self.config.compute_dtype == "bfloat16",
      ):
        loss = self.loss_fn(part_BL1) / len(self.parts)
      loss.backward()
      total = total + loss.detach()
    torch.nn.utils.clip_grad_norm_(
      self.network.parameters(), self.config.optimizer.clip_norm
    )
    self.optimizer.step()
    return total


@contextlib.contextmanager
def open_timer(
  name: str, config: Config, params: dict, tokens_BL1: np.ndarray
) -> Iterator[Timer]:
  """A timer that has made its first step.

  Args:
    name: of `PEERS`.
    config: of a baseline. params: its weights, which are copied.
    tokens_BL1: ids, every target counts.

  Raises:
    verify.Missing: torch or transformers is not installed.
    UserError: no class there has this model, or the run needs more than a
      plain step on one device.
  """
  plain = {"model.remat": (config.model.remat, False)}
  plain["lora.rank"] = (config.lora.rank, 0)
  for axis, size in dataclasses.asdict(config.mesh).items():
    plain[f"mesh.{axis}"] = (size, 1)
  for field, (value, want) in plain.items():
    if value != want:
      raise UserError(
        f"{field}={value}: {name} has the plain step of one device; leave it "
        f"at {want}"
      )
  layout = llama if config.model.norm == "rms" else gpt2
  tensors, hf_config = layout.to_hf(params, config.model)
  with tempfile.TemporaryDirectory() as folder:
    hf_files.write_folder(folder, tensors, hf_config, "float32")
    opened = verify.hf_model(pathlib.Path(folder), remote_code=False)
    with opened as (torch, network), torch.enable_grad():
      yield Timer(torch, network, config, tokens_BL1, name == "torch-compile")
