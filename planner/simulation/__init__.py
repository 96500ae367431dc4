"""Continuous batching without a device: when each request of a trace gets its tokens."""
