"""Measurements of speed: `decode` times forms of one model in turn.

`stats` holds the paired ratios and their intervals, `roofline` the bytes of a
step and the bandwidth of the machine.
"""
