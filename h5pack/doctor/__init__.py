"""`h5pack doctor`: measures each stage of feeding a training step, alone and together, and names the slowest."""
