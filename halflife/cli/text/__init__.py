"""Commands that prepare texts, one file a command."""
