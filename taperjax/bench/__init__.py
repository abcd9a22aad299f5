"""Measurements of speed, all in turn.

`decode` times forms of one model, `peers` other programs beside them, `train`
the phases of a training step, with those of `torch_step` beside them, `start`
what comes before the steps.

`stats` holds the paired ratios and their intervals, `roofline` the bytes of a
step and the bandwidth of the machine.
"""
