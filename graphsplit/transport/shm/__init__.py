"""Moves values between workers of one host, through memory that both map."""
