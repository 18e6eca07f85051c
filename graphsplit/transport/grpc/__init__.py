"""Moves values between workers of different hosts, over gRPC streams."""
