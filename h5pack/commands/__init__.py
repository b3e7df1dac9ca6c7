"""The commands of ``h5pack``. Each module defines the arguments of its commands, runs them and prints their reports."""
