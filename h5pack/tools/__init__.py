"""What the command line offers besides converting."""
