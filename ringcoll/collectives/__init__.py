"""The collectives, each in one file, and your own work under the messages: `gather` and its kin."""
