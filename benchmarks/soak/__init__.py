"""Random calls and training steps in one long run: each is right, and memory stays flat."""
