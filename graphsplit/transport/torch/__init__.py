"""Moves values between workers over ``torch.distributed``."""
