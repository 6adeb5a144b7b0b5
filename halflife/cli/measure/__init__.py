"""Commands that measure this machine, one file a command."""
