"""A judge of prices: SimGrid runs a schedule message by message."""
