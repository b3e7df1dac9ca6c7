"""How each peer is used in the comparison: a module for each package, imported only where that is measured."""
