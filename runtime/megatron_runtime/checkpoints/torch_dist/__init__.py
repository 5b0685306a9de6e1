"""Megatron-Core distributed checkpoints (`torch_dist`), which are torch.distributed.checkpoint files of a GPT model."""
