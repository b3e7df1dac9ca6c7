"""The commands, a module each: what a command takes, and what it prints."""
