"""Ostinato's readers beside those of LeRobot and Minari, on the same files."""
