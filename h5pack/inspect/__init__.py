"""Inspection of HDF5 files: description (`info`), integrity check (`verify`) and contact sheet (`preview`)."""
