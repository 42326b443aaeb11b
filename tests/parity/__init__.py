"""Parity with TorchRL: one script runs against both libraries, and what happens is compared."""
