"""The commands of ``h5pack``. Each module defines the arguments of one command, runs it and prints its report."""
