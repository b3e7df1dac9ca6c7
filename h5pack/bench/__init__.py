"""`h5pack bench`: which chunks, which order, which settings are fastest on this machine."""
