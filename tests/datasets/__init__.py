"""Tests of `ostinato.datasets`."""
