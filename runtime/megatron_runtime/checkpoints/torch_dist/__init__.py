"""Megatron-Core distributed checkpoints (`torch_dist`): torch.distributed.checkpoint files of a GPT model.

names.py says which rows of which stored tensor are which tensor of transformers; metadata.py and archive.py read the
files, checkpoint.py puts both together, writer.py writes; arguments.py translates the configuration.
"""
