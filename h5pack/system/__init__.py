"""Operating system utilities (CPUs, memory, processes, files, page cache), integer arrays and text formatting."""
