"""Pure tensor functions of a training step (losses, advantages, logprobs) and the step itself."""
