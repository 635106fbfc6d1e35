"""Streaming heads: which KV heads need the whole context, and which do with its start and the newest tokens."""
