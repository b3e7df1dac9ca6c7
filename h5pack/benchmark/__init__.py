"""`h5pack bench`: measures which chunk sizes, orders and settings are fastest on this machine."""
