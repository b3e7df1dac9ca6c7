"""Conversion on several machines: an executor on a Dask cluster, and what the parts of an array job share."""
