"""`h5pack doctor`: measure the stages of feeding a training step, each alone and all together; name the slowest."""
