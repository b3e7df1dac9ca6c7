"""The Triton kernels of `Normalize`. Importing a module of this package requires Triton."""
