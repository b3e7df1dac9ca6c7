"""Conversion on several machines: an executor on a Dask cluster, and the files that the parts of an array job share."""
