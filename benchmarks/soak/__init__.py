"""One long run of random calls and training steps: checks every result, and memory."""
