"""The `hf-sparse` command; one file a verb."""
