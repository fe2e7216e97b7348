"""Checkpoints whose safetensors have weights in a published precision: FP8, MXFP4, integers of 4 and 8 bits, NF4."""
