"""The version of h5pack."""

__version__ = "0.1.0"
