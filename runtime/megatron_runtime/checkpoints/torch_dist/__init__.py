"""Megatron-Core distributed checkpoints (`torch_dist`): torch.distributed.checkpoint files of a GPT model."""
