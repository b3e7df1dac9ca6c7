"""`h5pack doctor`: the stages of feeding a training step, apart and together, and which of them is too slow."""
